"""
Continues a text with a trained model; the text streams as it is produced.

    python sample.py --out_dir=out/shakespeare_char_cpu --start="ROMEO:" --temperature=0.8
    python sample.py --out_dir=out/shakespeare_char_cpu --interactive --show_depth
    python sample.py --init_from=gpt2 --residual=block --start="Once upon a time"
"""
if __name__ == '__main__':
    from config import program
    program.begin()
import io
import os
import sys
import time
import unicodedata
from dataclasses import dataclass

import torch

import config as configuration
from data.tokenizer import GPT2Tokenizer, tokenizer_from
from model import GPTConfig, check_sampling
from train import pick_device
from weights import build_model, checkpoint_file, from_pretrained, load_checkpoint

SEPARATOR = '\n---------------\n'


@dataclass
class SampleConfig:
    out_dir: str = 'out/run'  # the folder of the run to sample from
    which: str = 'best'  # best: the checkpoint with the lowest validation loss; latest: the newest
    init_from: str = ''  # GPT-2's weights instead of a run: gpt2, gpt2-medium, ..., or a folder
    residual: str | None = None  # the rule that GPT-2's weights run under; left out: standard
    residual_blocks: int | None = None  # how many, if the rule is block; left out: 8
    start: str | None = None  # the text to continue, or FILE:path; left out: a newline
    interactive: bool = False  # ask for one text after another; Ctrl-D ends
    num_samples: int = 1  # continuations, all computed at once; the first one streams
    max_new_tokens: int = 500  # length of each continuation
    temperature: float = 0.8  # below 1 safer, above 1 wilder; 0: always the most likely token
    top_k: int | None = 200  # draw from the k most likely tokens only; none: from all
    top_p: float | None = None  # draw from the fewest tokens that together have this probability
    seed: int = 1337  # the same seed and num_samples give the same texts
    show_depth: bool = False  # under each token, the source with most weight in the last read
    device: str = 'auto'  # auto | cpu | cuda | cuda:N | mps
    kernel: str = 'auto'  # how depth attention runs: auto | reference | torch | triton

    def __post_init__(self):
        check = configuration.checker(self)
        self.out_dir = configuration.expand(self.out_dir)
        self.init_from = configuration.expand(self.init_from)
        check('out_dir', self.out_dir.strip() and '\0' not in self.out_dir, 'the name of a folder')
        check('which', self.which in ('best', 'latest'), 'best or latest')
        if self.init_from:
            is_run = self.init_from == 'resume' or os.path.isfile(checkpoint_file(self.init_from))
            check('init_from', not is_run and '\0' not in self.init_from,
                  'the name of a GPT-2 or the folder of its weights; --out_dir samples a run')
            check('out_dir', self.out_dir == SampleConfig.out_dir, 'left out if init_from is given')
        else:
            for key in ('residual', 'residual_blocks'):
                check(key, getattr(self, key) is None,
                      'left out unless init_from is given: a run keeps its own rule')
        check('num_samples', 1 <= self.num_samples <= 4096, 'from 1 to 4096')
        check('max_new_tokens', 1 <= self.max_new_tokens < 2**31, 'from 1 to 2**31 - 1')
        check('seed', 0 <= self.seed < 2**63, 'from 0 to 2**63 - 1')
        config = GPTConfig(residual=self.residual or 'standard', kernel=self.kernel)
        check_sampling(config, torch.zeros(1, 1), 1, self.temperature, self.top_k, self.top_p, None)


def read_start(start):
    """ The text to continue: start itself, or what the file holds if it is FILE:path. """
    text, name = start, configuration.brief.repr(start)
    if start is not None and start.startswith('FILE:'):
        path = configuration.expand(start.removeprefix('FILE:'))
        try:
            with open(path, encoding='utf-8-sig', newline='') as f:  # newline='' keeps \r\n
                text = f.read()
        except (OSError, ValueError) as e:  # ValueError: not UTF-8, a null in the name
            fault = getattr(e, 'strerror', None) or e
            raise ValueError(f'start={name}: must be a readable UTF-8 file: {fault}') from e
    if text == '':
        raise ValueError(f'start={name}: must have at least one character')
    return text


def default_start(tokenizer):
    """ The text to continue if none is given: a newline, or another character that is known. """
    known = getattr(tokenizer, 'chars', '\n')  # tokenizers without chars know every text
    return '\n' if '\n' in known else known[0]


def load(cfg):
    """ (model, tokenizer): those of the run in out_dir or, if init_from is given, GPT-2's. """
    if cfg.init_from:
        keys = {'residual': cfg.residual, 'residual_blocks': cfg.residual_blocks}
        given = {key: value for key, value in keys.items() if value is not None}
        return from_pretrained(cfg.init_from, kernel=cfg.kernel, **given), GPT2Tokenizer()
    name = 'best.pt' if cfg.which == 'best' else 'ckpt.pt'
    path = os.path.join(cfg.out_dir, name)
    if not os.path.exists(path):
        raise ValueError(f'out_dir={cfg.out_dir!r}: must hold {name}; python train.py makes one')
    state = load_checkpoint(path)
    try:
        tokenizer = tokenizer_from(state['tokenizer'])
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f'{path}: must hold the tokenizer of its run; {e!r}') from e
    return build_model(state, path, cfg.kernel), tokenizer


class Sampler:
    """ A trained model with its tokenizer; sampler(text, write) continues a text.

    One generator serves all calls, so a text that is given twice is continued in two ways.
    """
    def __init__(self, cfg):
        self.cfg = cfg
        self.device = pick_device(cfg.device)
        self.generator = torch.Generator().manual_seed(cfg.seed)  # tokens are drawn on the CPU
        self.model, self.tokenizer = load(cfg)
        rows, needed = self.model.config.vocab_size, self.tokenizer.n_vocab
        if rows < needed:
            raise ValueError(f'{cfg.init_from or cfg.out_dir}: must have an embedding for each of '
                             f'the {needed} tokens of its tokenizer, it has {rows}')
        self.model.to(self.device)
        self.top_source = None  # look sets it
        if cfg.show_depth:
            if not hasattr(self.model.residual, 'on_read'):
                raise ValueError('show_depth=True: must be off for a model without depth attention')
            self.model.residual.on_read = self.look

    def look(self, l, alpha):
        """ Notes which source has most weight for the first text's newest token in read l.

        alpha (n, B, T) are the weights. Each read overwrites the one before, so the output's stays.
        """
        self.top_source = alpha[:, 0, -1].argmax().item()

    def __call__(self, text=None, write=lambda text: None):
        """ A list of num_samples texts that begin with text.

        The first one is passed to write piece by piece as it comes, then the others are.
        """
        cfg, tok = self.cfg, self.tokenizer
        if text is None:
            text = default_start(tok)
        try:
            ids = tok.encode(text, special=True).tolist()
        except ValueError as e:
            raise ValueError(f'start={configuration.brief.repr(text)}: {e}') from e
        idx = torch.tensor([ids] * cfg.num_samples, device=self.device)
        texts = [text] * cfg.num_samples
        write(text)
        streamers = [tok.streamer() for _ in texts]
        seen = []  # (text, source) of each token of the first sample
        stream = self.model.stream(idx, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p,
                                   tok.n_vocab, self.generator)
        for new in stream:
            new_ids = new[:, 0].tolist()
            pieces = [decode(i) for decode, i in zip(streamers, new_ids, strict=True)]
            texts = [before + piece for before, piece in zip(texts, pieces, strict=True)]
            write(pieces[0])
            seen.append((pieces[0], self.top_source))
        if cfg.show_depth:
            write('\n' + show_depths(seen))
        for other in texts[1:]:
            write(SEPARATOR + other)
        write(SEPARATOR)
        return texts


SIGNS = '0123456789abcdefghijklmnopqrstuvwxyz+'  # one for each source


def columns(text):
    """ The columns of a terminal that text takes: two a wide character, none a combining mark. """
    n = 0
    for c in text:
        if unicodedata.category(c) not in ('Mn', 'Me'):
            n += 2 if unicodedata.east_asian_width(c) in 'WF' else 1
    return n


def show_depths(seen, width=80):
    """ Lines of tokens, each with a line of signs below: a token's source under its first column.

    seen: (text, source) of each token. The sign 0 is the embedding, then 1 to 9, a to z and + stand
    for the later sources.
    """
    lines, room = [], 0
    for text, source in seen:
        text = ''.join(c if c.isprintable() else ' ' for c in text)
        if columns(text) == 0:
            text += ' '  # room for the sign
        n_columns = columns(text)
        if n_columns > room:
            lines += ['text  ', 'depth ']
            room = width
        lines[-2] += text
        lines[-1] += SIGNS[min(source, len(SIGNS) - 1)].ljust(n_columns)
        room -= n_columns
    lines.append('(0: the embedding, n: the n-th sublayer or residual block)')
    return '\n'.join(line.rstrip() for line in lines)


def sample(cfg, write=lambda text: None):
    """ A list of the texts that Sampler(cfg) makes of cfg.start; write gets them as they come. """
    return Sampler(cfg)(read_start(cfg.start), write)


def show(sampler, text):
    """ Samples to the terminal, then says how fast that was. """
    began = time.perf_counter()
    sampler(text, lambda piece: print(piece, end='', flush=True))
    speed = sampler.cfg.num_samples * sampler.cfg.max_new_tokens / (time.perf_counter() - began)
    print(f'{speed:,.0f} tokens/s', file=sys.stderr)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    values = configuration.parse(SampleConfig, argv, __doc__.split('\n\n')[0])
    cfg = configuration.build(SampleConfig, values)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='replace')  # not every terminal can show every character
    try:
        start = read_start(cfg.start)
        sampler = Sampler(cfg)
        if not cfg.interactive:
            show(sampler, start)
        while cfg.interactive:
            try:
                show(sampler, read_start(input('> ')))
            except EOFError:
                return
            except ValueError as e:  # ask again
                print(f'error: {e}', file=sys.stderr)
    except ValueError as e:
        configuration.fail(e)
    except RuntimeError as e:
        configuration.fail(e, code=1)


if __name__ == '__main__':
    program.run(main)
