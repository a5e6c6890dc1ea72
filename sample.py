"""
Continues a text with a trained model; the text streams as it is produced.

    python sample.py --out_dir=out/shakespeare_char_cpu --start="ROMEO:" --max_new_tokens=300 --temperature=0.8
    python sample.py --out_dir=out/shakespeare_char_cpu --interactive --show_depth
"""
import os
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

import config as configuration
from data.prepare import tokenizer_from
from model import GPT, GPTConfig, check_sampling
from train import pick_device, read_checkpoint


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # the folder that train.py wrote
    which: str = 'best'  # best: lowest validation loss; latest: the newest checkpoint
    start: str = '\n'  # the text to continue, or FILE:path
    interactive: bool = False  # ask for one text after another; Ctrl-D ends
    num_samples: int = 1  # how many continuations, computed side by side: the first streams, the others follow
    max_new_tokens: int = 500  # length of each
    temperature: float = 0.8  # below 1 safer, above 1 wilder; 0: always the most likely token
    top_k: int | None = 200  # draw from the k most likely tokens only; none: from all
    top_p: float | None = None  # draw from the fewest tokens that together have this probability
    seed: int = 1337  # the same seed and num_samples give the same texts
    show_depth: bool = False  # a line: the source that the output read weighed most, at each token of the first text
    device: str = 'auto'  # auto | cpu | cuda | mps
    kernel: str = 'auto'  # how depth attention runs: auto | reference | torch | triton

    def __post_init__(self):
        check = configuration.checker(self)
        check('out_dir', self.out_dir.strip() and '\0' not in self.out_dir, 'the name of a folder')
        check('which', self.which in ('best', 'latest'), 'best or latest')
        check('num_samples', 1 <= self.num_samples <= 4096, 'from 1 to 4096')
        check('max_new_tokens', 1 <= self.max_new_tokens < 2**31, 'from 1 to 2**31 - 1')
        check('seed', 0 <= self.seed < 2**63, 'from 0 to 2**63 - 1')
        check_sampling(GPTConfig(), torch.zeros(1, 1), 1, self.temperature, self.top_k, self.top_p, None)


def read_start(start):
    """ The text to continue, read from a file if start is FILE:path. """
    show, text = configuration.brief.repr(start), start
    if start.startswith('FILE:'):
        try:
            with open(start[5:], encoding='utf-8-sig') as f:
                text = f.read()
        except (OSError, ValueError) as e:  # ValueError: not UTF-8, a null in the name
            raise ValueError(f'start={show}: must be a readable UTF-8 file: {getattr(e, "strerror", None) or e}') from e
    if not text:
        raise ValueError(f'start={show}: must have at least one character')
    return text


class Sampler:
    """ A trained model with its own tokenizer; sampler(text, write) streams continuations and returns them. """
    def __init__(self, cfg):
        self.cfg, self.device = cfg, pick_device(cfg.device)
        path = os.path.join(cfg.out_dir, 'best.pt' if cfg.which == 'best' else 'ckpt.pt')
        if not os.path.exists(path):
            raise ValueError(f'out_dir={cfg.out_dir!r}: must hold {os.path.basename(path)}; python train.py makes one')
        state = read_checkpoint(path, ['tokenizer'])
        kernel = 'reference' if cfg.show_depth else cfg.kernel
        try:
            self.tokenizer = tokenizer_from(state['tokenizer'])
            self.model = GPT(GPTConfig(**state['model_config'], kernel=kernel))
            self.model.load_state_dict(state['model'])
        except (AttributeError, KeyError, TypeError, RuntimeError) as e:
            raise ValueError(f'{path}: does not fit this version of model.py ({str(e)[:200]})') from e
        self.model.to(self.device).eval()
        self.depth = self.sources = None  # which has the largest weight for the newest token, of how many: last read
        if cfg.show_depth:
            if not hasattr(self.model.residual, 'attend'):
                raise ValueError('show_depth=True: must be off for a model without depth attention')
            self.model.residual.attend.register_forward_hook(self.look)
            print('show_depth: kernel=reference, the one that shows its weights', file=sys.stderr)

    def look(self, attend, inputs, output):
        """ Forward hook: evaluates the weights that the model just used, for the first row's newest token. """
        w, v = inputs
        self.depth, self.sources = attend.alpha(w, [source[:1, -1:] for source in v]).argmax(0).item(), len(v)

    def __call__(self, text, write=lambda text: None):
        cfg, tok = self.cfg, self.tokenizer
        try:
            ids = np.asarray(tok.encode(text), dtype=np.int64)
        except ValueError as e:
            raise ValueError(f'start={configuration.brief.repr(text)}: {e}') from e
        idx = torch.from_numpy(ids)[None].expand(cfg.num_samples, -1).to(self.device)  # one prefill for all
        generator = torch.Generator(self.device).manual_seed(cfg.seed)
        decode = [tok.streamer() for _ in range(cfg.num_samples)]
        texts, seen = [''.join(d(i) for i in ids.tolist()) for d in decode], []
        write(texts[0])
        how = (cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, tok.n_vocab, generator)
        for new in self.model.stream(idx, *how):
            pieces = [d(i) for d, i in zip(decode, new[:, 0].tolist(), strict=True)]
            texts = [t + p for t, p in zip(texts, pieces, strict=True)]
            write(pieces[0])
            seen.append((pieces[0], self.depth))
        if cfg.show_depth:
            write('\n' + show_depths(seen, self.sources, sys.stdout.isatty()))
        write(''.join(f'\n---------------\n{t}' for t in texts[1:]) + '\n---------------\n')
        return texts


def show_depths(seen, most, colour, width=80):
    """ The tokens in lines, one sign under each: 0 the embedding, then 1 .. 9, a .. z, + in the order of the sources.

    seen: (text, source) of each token. Blue is early, red late; most: the number of sources.
    """
    hues = '27 33 39 45 50 82 154 226 214 208 202 196'.split()  # of the terminal's 256 colours
    paint = '\033[38;5;{hue}m{sign}\033[0m' if colour else '{sign}'
    lines, room = [], 0
    for text, d in seen:
        text = ''.join(c if c.isprintable() else ' ' for c in text) or ' '
        sign = paint.format(hue=hues[d * (len(hues) - 1) // max(1, most - 1)],
                            sign='0123456789abcdefghijklmnopqrstuvwxyz+'[min(d, 36)])
        if len(text) > room:
            lines, room = lines + ['text  ', 'depth '], width
        lines[-2], lines[-1], room = lines[-2] + text, lines[-1] + sign + ' ' * (len(text) - 1), room - len(text)
    return '\n'.join(map(str.rstrip, lines)) + '\n(0: the embedding, n: the n-th sublayer or residual block)'


def sample(cfg, write=lambda text: None):
    """ Streams num_samples texts to write(text) and returns them as a list of strings, prompts included. """
    return Sampler(cfg)(read_start(cfg.start), write)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cfg = configuration.build(SampleConfig, configuration.parse(SampleConfig, argv, __doc__.split('\n\n')[0]))
    def write(text):
        print(text, end='', flush=True)

    def timed(text):
        began = time.perf_counter()
        sampler(text, write)
        speed = cfg.num_samples * cfg.max_new_tokens / (time.perf_counter() - began)
        print(f'{speed:,.0f} tokens/s', file=sys.stderr)

    try:
        start, sampler = read_start(cfg.start), Sampler(cfg)
        while cfg.interactive:
            try:
                timed(read_start(input('> ')))
            except EOFError:
                return
            except ValueError as e:  # ask again
                print(f'error: {e}', file=sys.stderr)
        timed(start)
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)  # at once, nothing is left to write
    except OSError as e:
        configuration.fail(e, code=1)


if __name__ == '__main__':
    main()
