"""
Continues a text with a trained model; the text streams as it is produced.

    python sample.py --out_dir=out/shakespeare_char_cpu --start="ROMEO:" --max_new_tokens=300 --temperature=0.8
"""
import os
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from data.prepare import tokenizer_from

import config as configuration
from model import GPT, GPTConfig, check_sampling, load_checkpoint
from train import pick_device


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # the folder that train.py wrote
    which: str = 'best'  # best: lowest validation loss; latest: the newest checkpoint
    start: str = '\n'  # the text to continue, or FILE:path
    num_samples: int = 1  # how many continuations
    max_new_tokens: int = 500  # length of each
    temperature: float = 0.8  # below 1 bolder, above 1 wilder; 0: always the most likely token
    top_k: int | None = 200  # draw from the k most likely tokens only; none: from all
    top_p: float | None = None  # draw from the fewest tokens that together have this probability
    seed: int = 1337  # the same seed gives the same text
    device: str = 'auto'  # auto | cpu | cuda | mps
    kernel: str = 'auto'  # how depth attention runs: auto | reference | torch | triton

    def __post_init__(self):
        def check(key, ok, allowed):
            if not ok:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {allowed}')
        check('which', self.which in FILES, 'best or latest')
        check('num_samples', self.num_samples >= 1, '1 or more')
        check('max_new_tokens', self.max_new_tokens >= 1, '1 or more')
        check('seed', 0 <= self.seed < 2**63, 'from 0 to 2**63 - 1')


FILES = {'best': 'best.pt', 'latest': 'ckpt.pt'}


def prompt(cfg, tokenizer):
    """ The tokens (1, T) to continue. """
    text = cfg.start
    if text.startswith('FILE:'):
        try:
            with open(text[5:], encoding='utf-8') as f:
                text = f.read()
        except OSError as e:
            raise ValueError(f'start={cfg.start!r}: {e.strerror}') from e
        except UnicodeDecodeError as e:
            raise ValueError(f'start={cfg.start!r}: not UTF-8 at byte {e.start}') from e
    if not text:
        raise ValueError(f'start={cfg.start!r}: is empty; give at least one character')
    try:
        ids = tokenizer.encode(text)
    except ValueError as e:
        raise ValueError(f'start: {e}') from e
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]


def sample(cfg, write=None):
    """ Streams num_samples texts to write(text) and returns them as a list of strings, prompts included. """
    device = pick_device(cfg.device)
    path = os.path.join(cfg.out_dir, FILES[cfg.which])
    if not os.path.exists(path):
        raise ValueError(f'out_dir={cfg.out_dir!r}: has no {FILES[cfg.which]}; python train.py makes one')
    state = load_checkpoint(path, device)
    tokenizer = tokenizer_from(state['tokenizer'])
    model = GPT(GPTConfig(**state['model_config'], kernel=cfg.kernel))
    model.load_state_dict(state['model'])
    model.to(device).eval()
    idx = prompt(cfg, tokenizer).to(device)
    n_vocab = tokenizer.n_vocab
    check_sampling(model.config, idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, n_vocab)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    texts = []
    for _ in range(cfg.num_samples):
        decode = tokenizer.streamer()
        text = ''.join(decode(token) for token in idx[0].tolist())
        if write:
            write(text)
        for token in model.stream(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, n_vocab, generator):
            piece = decode(token.item())
            text += piece
            if write:
                write(piece)
        if write:
            write('\n---------------\n')
        texts.append(text)
    return texts


def main(argv=None):
    cfg = configuration.build(SampleConfig, configuration.parse(SampleConfig, sys.argv[1:] if argv is None else argv,
                                                                __doc__.split('\n\n')[0]))

    def write(text):
        sys.stdout.write(text)
        sys.stdout.flush()

    began = time.perf_counter()
    try:
        sample(cfg, write)
    except ValueError as e:
        configuration.fail(e)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    seconds = time.perf_counter() - began
    print(f'{cfg.num_samples * cfg.max_new_tokens / seconds:,.0f} tokens/s', file=sys.stderr)


if __name__ == '__main__':
    main()
