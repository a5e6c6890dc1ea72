""" Token files read back: the batches that a run trains on and is evaluated on. """
import hashlib
import math

import numpy as np
import torch

from data.prepare import load

GOLDEN = (math.sqrt(5) - 1) / 2  # 1 / golden ratio


class Data:
    """ The token files of a dataset, read in windows of n_ctx tokens and their successors.

    cfg: dataset, vocab_size, n_ctx, batch_size, gradient_accumulation_steps, eval_iters, seed and
    data_seed count. ValueError if the files do not fit these.
    """
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.meta, self.tokens = load(cfg.dataset)
        # Open files stay as they are if the dataset is prepared anew.
        self.files = {split: open(tokens.filename, 'rb') for split, tokens in self.tokens.items()}
        n_vocab = self.meta['n_vocab']
        padded = n_vocab if n_vocab < 1024 else -(-n_vocab // 64) * 64
        self.rows = cfg.vocab_size or padded  # of the embedding
        for split, tokens in self.tokens.items():
            if len(tokens) <= cfg.n_ctx:
                raise ValueError(f'n_ctx={cfg.n_ctx}: must be below {len(tokens)}, the tokens in '
                                 f'{split}.bin of dataset={cfg.dataset!r}; lower it or prepare a '
                                 'longer text')
        if self.rows < n_vocab:
            raise ValueError(f'vocab_size={self.rows}: must be {n_vocab} or more '
                             f'for dataset={cfg.dataset!r}')
        self.sha = {split: self.fingerprint(split) for split in self.tokens}

    def fingerprint(self, split, piece=2**15):
        """ A hash of a token file: its length and all of it; beyond 64 MiB, 1024 pieces of it. """
        n = len(self.tokens[split])
        sha = hashlib.sha256(str(n).encode())
        n_pieces = min(1024, -(-n // piece))
        for start in np.linspace(0, max(0, n - piece), n_pieces).astype(int):
            sha.update(self.read(split, slice(start, start + piece)))
        return sha.hexdigest()

    def read(self, split, where):
        """ tokens[where]; ValueError if an id is past the vocabulary. """
        # Mapped anew each time: pages that were read would pile up in memory.
        tokens = np.memmap(self.files[split], '<u2', 'r')[where]
        if tokens.max() >= self.meta['n_vocab']:
            raise ValueError(f'dataset={self.cfg.dataset!r}: must have token ids below '
                             f'{self.meta["n_vocab"]}, {split}.bin has {tokens.max()}; '
                             'prepare it again')
        return tokens

    def windows(self, split, starts):
        """ Inputs and targets, both (B, n_ctx), of the windows that begin at starts. """
        places = starts[:, None] + np.arange(self.cfg.n_ctx + 1)
        both = torch.from_numpy(self.read(split, places).astype(np.int64))
        if self.device.type == 'cuda':
            both = both.pin_memory().to(self.device, non_blocking=True)
        return both[:, :-1].to(self.device), both[:, 1:].to(self.device)

    def train_batch(self, step, micro):
        """ The batch of one forward pass: it depends on the settings, step and micro alone.

        Window k of the run starts at the fraction k / golden ratio (modulo 1) of the text, counted
        from a random place. No order is more even, so each part of the text is seen equally often;
        one pass of windows drawn at random would miss 37 % of it.
        """
        cfg = self.cfg
        first = (step * cfg.gradient_accumulation_steps + micro) * cfg.batch_size
        k = first + np.arange(cfg.batch_size)
        offset = np.random.default_rng(cfg.data_seed or cfg.seed).random()
        fraction = (offset + k * GOLDEN) % 1.0
        n_starts = len(self.tokens['train']) - cfg.n_ctx
        return self.windows('train', (fraction * n_starts).astype(np.int64))

    def val_batches(self, rank=0, world=1):
        """ Every world-th batch of the validation windows, which do not overlap.

        These are all windows, or eval_iters batches of them spread evenly over the text.
        """
        B, n_ctx = self.cfg.batch_size, self.cfg.n_ctx
        starts = np.arange(0, len(self.tokens['val']) - n_ctx, n_ctx)
        wanted = self.cfg.eval_iters * B
        if 0 < wanted < len(starts):
            starts = starts[np.linspace(0, len(starts) - 1, wanted).round().astype(int)]
        for i in range(rank * B, len(starts), world * B):
            yield self.windows('val', starts[i:i + B])
