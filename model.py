"""
A GPT whose residual connection is a choice: standard, Full or Block Attention Residuals (AttnRes, arXiv 2603.15031).

The network is GPT-2's, written as in nanoGPT: LayerNorm, causal self-attention, MLP with tanh GELU, learned positions,
tied head. Apart from a smaller norm_eps it differs in one place. A transformer block does not add anything to anything:
it hands out its two *sublayers*, and a *residual rule* runs all L = 2 * n_layer of them, deciding what each one reads
and what becomes of its output. The three rules stand one under the other below; RESIDUALS names them; nothing else in
the forward pass knows which one is at work.

Reading order: leaves up. Shapes at line ends: B sequences, T tokens, D = n_embd, V = vocab_size, n sources.
"""
import math
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kernels


@dataclass
class GPTConfig:
    n_ctx: int = 1024  # context length in tokens
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12  # transformer blocks; each has two sublayers, attention and MLP
    n_head: int = 12  # attention heads
    n_embd: int = 768  # width D
    dropout: float = 0.0  # on embedding, attention weights and sublayer outputs
    bias: bool = True  # biases in Linear and LayerNorm, as in GPT-2
    norm_eps: float = 1e-10  # of all norms, those of the depth keys too; 1e-5 with GPT-2's weights
    residual: str = 'standard'  # residual rule: standard | full | block, or one of baselines.py
    residual_blocks: int = 8  # block mode: N residual blocks of ceil(2 * n_layer / N) sublayers
    scale_proj_init: bool = True  # initialise output projections smaller, by 1/sqrt(2 * n_layer)
    kernel: str = 'auto'  # how depth attention runs: auto | reference | torch | triton
    recompute: bool = False  # activation checkpointing: recompute each sublayer in the backward pass

    def __post_init__(self):
        def check(key, ok, allowed):
            if not ok:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {allowed}')

        for f in fields(self):
            check(f.name, type(getattr(self, f.name)) in (f.type, int if f.type is float else f.type),
                  f'of type {f.type.__name__}')
        for key in ('n_ctx', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'residual_blocks'):
            check(key, 1 <= getattr(self, key) < 2**31, 'a whole number from 1 to 2**31 - 1')
        check('n_embd', self.n_embd % self.n_head == 0, f'divisible by n_head={self.n_head}')
        check('dropout', 0 <= self.dropout < 1, 'in [0, 1)')
        check('norm_eps', 0 <= self.norm_eps < math.inf, 'zero or a small positive number')
        check('residual', self.residual in RESIDUALS, 'one of ' + ', '.join(RESIDUALS))
        check('kernel', self.kernel in kernels.KERNELS, 'one of ' + ', '.join(kernels.KERNELS))
        if self.residual == 'block':
            L = 2 * self.n_layer
            check('residual_blocks', 1 <= self.residual_blocks <= L, f'from 1 to 2 * n_layer = {L}')


# -----------------------------------------------------------------------------
# The residual rules. forward(h, sublayers): h is the embedding (B, T, D); sublayers are the L callables f_0 .. f_{L-1},
# (B, T, D) -> (B, T, D), each with its own pre-norm, adding nothing. The result goes to the final norm.

class Standard(nn.Module):
    """ h <- h + f(h) """
    def __init__(self, config):
        super().__init__()

    def forward(self, h, sublayers):
        for f in sublayers:
            h = h + f(h)
        return h

    def describe(self):
        return 'h <- h + f(h)'


class DepthAttention(nn.Module):
    """ h = sum_i alpha_i v_i,   alpha = softmax over i of  w . RMSNorm(v_i)   (paper eq. 2 to 4)

    w (D,) is pseudo-query * key gain, v a tuple of n sources (B, T, D). No 1/sqrt(D), no projections. Scores, softmax
    are float32 (float64 stays float64), also under autocast. No source is normalised in memory: w . RMSNorm(v) =
    (w . v) / rms(v). With kernel='reference' a forward hook here sees every (w, v); the fast paths do not pass by.
    """
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def alpha(self, w, v):
        """ The weights, (n, B, T), summing to 1 over n. """
        def score(v_i):
            v_i = v_i.to(w.dtype)
            return (v_i * w).sum(-1) * torch.rsqrt(v_i.square().mean(-1) + self.eps)  # (B, T)
        return torch.stack([score(v_i) for v_i in v]).softmax(0)

    def forward(self, w, v):
        if len(v) == 1:  # softmax over one score is 1
            return v[0]
        h = sum(a.unsqueeze(-1) * v_i for a, v_i in zip(self.alpha(w, v), v, strict=True))
        return h.to(v[0].dtype)


class AttnRes(nn.Module):
    """ What Full and Block share: one pseudo-query and one key gain per sublayer, and one pair for the output.

    Queries start at zero, so every read starts as the plain mean of its sources. They sum to the standard residual
    stream and every reader normalises, so at initialisation all three rules are the same function (up to norm_eps).
    Row 0 reads a single source, so its gradient is zero; it is there so that row l belongs to sublayer l.
    A subclass gives residual_block_length(config), S, and rule(w, h, sublayers), the mathematics.
    """
    def __init__(self, config):
        super().__init__()
        self.L, self.S = 2 * config.n_layer, self.residual_block_length(config)
        self.query = nn.Parameter(torch.zeros(self.L + 1, config.n_embd))
        self.key_gain = nn.Parameter(torch.ones(self.L + 1, config.n_embd))  # acts only as query * key_gain
        self.attend = DepthAttention(config.norm_eps)
        self.kernel = config.kernel

    def forward(self, h, sublayers):
        if len(sublayers) != self.L:
            raise ValueError(f'{len(sublayers)} sublayers: must be 2 * n_layer = {self.L}')
        w = (self.query * self.key_gain).to(torch.promote_types(h.dtype, torch.float32))  # (L + 1, D)
        if torch.is_autocast_enabled(h.device.type):  # the sublayers' dtype; Standard's sum is float32
            h = h.to(torch.get_autocast_dtype(h.device.type))
        path = kernels.choose(self.kernel, h)
        if path == 'reference':
            return self.rule(w, h, sublayers)
        return kernels.depth_attention(h, sublayers, w, self.S, self.attend.eps, path)  # the same, fast

    def describe(self):
        n, last = math.ceil(self.L / self.S), (self.L - 1) % self.S + 1
        return f'{self.L} sublayers in {n} residual blocks of {self.S}' + f', the last of {last}' * (last < self.S)


class FullAttnRes(AttnRes):
    """ h_l = sum_i alpha_{i->l} v_i,   v_0 = embedding, v_{l+1} = f_l(h_l) """
    def residual_block_length(self, config):
        return 1

    def rule(self, w, h, sublayers):
        v = (h,)
        for l, f in enumerate(sublayers):
            v = (*v, f(self.attend(w[l], v)))
        return self.attend(w[-1], v)


class BlockAttnRes(AttnRes):
    """ The same over sums: of each finished residual block of S sublayers, and of the one in progress """
    def residual_block_length(self, config):
        return math.ceil(2 * config.n_layer / config.residual_blocks)

    def rule(self, w, h, sublayers):
        v = (h,)
        for l, f in enumerate(sublayers):
            y = f(self.attend(w[l], v))
            v = (*v, y) if l % self.S == 0 else (*v[:-1], v[-1] + y)  # a residual block begins, or goes on
        return self.attend(w[-1], v)


RESIDUALS = {'standard': Standard, 'full': FullAttnRes, 'block': BlockAttnRes}

# -----------------------------------------------------------------------------
# GPT-2's parts.

class LayerNorm(nn.Module):
    """ (x - mean) / std * weight + bias, the bias being optional """
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None
        self.eps = config.norm_eps

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Cache:
    """ Keys and values of one attention sublayer, (B, n_head, length, D / n_head), for decoding token by token """
    def __init__(self, n_ctx):
        self.n_ctx, self.length = n_ctx, 0

    def extend(self, k, v):
        if self.length == 0:
            self.kv = k.new_empty(2, *k.shape[:2], self.n_ctx, k.size(-1))
        end = self.length + k.size(2)
        self.kv[0, :, :, self.length:end] = k
        self.kv[1, :, :, self.length:end] = v
        self.length = end
        return self.kv[0, :, :, :end], self.kv[1, :, :, :end]


class CausalSelfAttention(nn.Module):
    """ softmax(q k^T / sqrt(d)) v over the past, n_head times side by side """
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x, cache=None):
        B, T, D = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, D // self.n_head).permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        past, mask = 0, None
        if cache is not None:
            past = cache.length
            k, v = cache.extend(k, v)
            if past and T > 1:  # query t sees the past and the first t + 1 of the new tokens
                mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past == 0 and T > 1,
                                           dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """ W2 gelu(W1 x) """
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate='tanh')))


class Sublayer:
    """ f(h) = body(norm(h)): what a residual rule calls. It adds nothing itself. """
    def __init__(self, norm, body):
        self.norm, self.body = norm, body

    def __call__(self, h):
        return self.body(self.norm(h))


class Block(nn.Module):
    """ A transformer block: the parameters of two sublayers. How they are joined is the residual rule's business. """
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def sublayers(self, cache=None):
        attn = self.attn if cache is None else partial(self.attn, cache=cache)
        return [Sublayer(self.ln_1, attn), Sublayer(self.ln_2, self.mlp)]


class GPT(nn.Module):
    """ GPT-2: embeddings, the residual rule over all sublayers, a norm, logits from the embedding's own matrix """
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.n_ctx, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=LayerNorm(config),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied, as in GPT-2
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                small = config.scale_proj_init and name.endswith('c_proj')
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * config.n_layer) if small else 0.02)
                if getattr(module, 'bias', None) is not None:
                    nn.init.zeros_(module.bias)
        self.residual = RESIDUALS[config.residual](config)  # draws nothing: same seed, same weights in every mode

    def n_params(self):
        """ Number of parameters, the tied embedding counted once. """
        return sum(p.numel() for p in self.parameters())

    def sublayers(self, caches=None):
        """ The L = 2 * n_layer functions f_l, in order. """
        fs = [f for b, block in enumerate(self.transformer.h) for f in block.sublayers(caches and caches[b])]
        if self.config.recompute and self.training:
            fs = [partial(checkpoint, f, use_reentrant=False) for f in fs]
        return fs

    def forward(self, idx, targets=None, caches=None):
        """ Next-token logits (B, T, V) of tokens idx (B, T), and the mean cross-entropy with targets (B, T) or None.

        caches, one Cache a transformer block, hold the tokens before idx and take these in. Targets of -1 do not count.
        """
        T, past = idx.size(1), caches[0].length if caches else 0
        if past + T > self.config.n_ctx:
            raise ValueError(f'idx has {past + T} tokens: n_ctx={self.config.n_ctx} is the most')
        pos = torch.arange(past, past + T, device=idx.device)
        h = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, D)
        h = self.residual(h, self.sublayers(caches))
        logits = self.lm_head(self.transformer.ln_f(h))  # (B, T, V)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """ AdamW. Matrices and embeddings decay; gains, biases and whatever belongs to the residual rule do not. """
        decays = {name: p.dim() >= 2 and not name.startswith('residual.') for name, p in self.named_parameters()}
        groups = [{'params': [p for name, p in self.named_parameters() if decays[name] == decay],
                   'weight_decay': weight_decay if decay else 0.0} for decay in (True, False)]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=tuple(betas), fused=True)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None, generator=None):
        """ Yields max_new_tokens times the next token of each row of idx (B, T), as (B, 1).

        temperature 0 takes the most likely token; top_k keeps the k most likely, top_p the smallest set of them with
        that probability; ids from n_vocab on (padding of the vocabulary) are never drawn. Keys and values are cached
        while the window has room. Positions are absolute, so a full window is cut to its last n_ctx / 2 tokens and read
        anew; a prompt longer than n_ctx is cut to its last n_ctx tokens first.
        """
        check_sampling(self.config, idx, max_new_tokens, temperature, top_k, top_p, n_vocab)
        n_ctx = self.config.n_ctx
        window, caches, new = idx[:, -n_ctx:], None, None
        for _ in range(max_new_tokens):
            if caches is None or caches[0].length == n_ctx:
                if caches is not None:
                    window = window[:, -max(1, n_ctx // 2):]
                caches, new = [Cache(n_ctx) for _ in self.transformer.h], window
            logits = self(new, caches=caches)[0][:, -1].float()  # (B, V)
            new = pick(logits[:, :n_vocab], temperature, top_k, top_p, generator)
            window = torch.cat((window, new), dim=1)
            yield new

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None, generator=None):
        """ idx (B, T) continued by max_new_tokens tokens, (B, T + max_new_tokens). See stream. """
        return torch.cat([idx, *self.stream(idx, max_new_tokens, temperature, top_k, top_p, n_vocab, generator)], dim=1)

    @classmethod
    def from_checkpoint(cls, path, device='cpu', kernel='auto'):
        """ The model that train.py saved in a file, or in the best.pt (else ckpt.pt) of a folder, in eval mode. """
        import weights
        return weights.from_checkpoint(path, device, kernel)

    @classmethod
    def from_pretrained(cls, name_or_dir, residual='standard', **overrides):
        """ GPT-2 under any residual rule, in eval mode; overrides: what of GPTConfig its weights leave open. """
        import weights
        return weights.from_pretrained(name_or_dir, residual, **overrides)

    def save_pretrained(self, folder):
        """ Writes a folder that transformers loads: GPT2LMHeadModel.from_pretrained(folder). Standard mode only. """
        import weights
        weights.save_pretrained(self, folder)


def check_sampling(config, idx, max_new_tokens, temperature, top_k, top_p, n_vocab):
    def check(key, value, ok, allowed):
        if not ok:
            raise ValueError(f'{key}={value!r}: must be {allowed}')
    check('idx', tuple(idx.shape), idx.dim() == 2 and idx.size(1) > 0, 'tokens (B, T) with T at least 1')
    def number(value, *kinds):
        return type(value) in kinds
    check('max_new_tokens', max_new_tokens, number(max_new_tokens, int) and max_new_tokens >= 0, 'an integer from 0')
    check('temperature', temperature, number(temperature, int, float) and 0 <= temperature < math.inf,
          '0 (greedy) or a positive number')
    check('top_k', top_k, top_k is None or number(top_k, int) and top_k >= 1, 'a whole number from 1')
    check('top_p', top_p, top_p is None or number(top_p, int, float) and 0 < top_p <= 1, 'in (0, 1]')
    check('n_vocab', n_vocab, n_vocab is None or number(n_vocab, int) and 1 <= n_vocab <= config.vocab_size,
          f'a whole number from 1 to {config.vocab_size}')


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """ One token (B, 1) drawn from softmax(logits / temperature), logits (B, V), after the cuts. """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = (logits - logits.max(-1, keepdim=True).values).double() / temperature  # finite at any temperature
    if top_k is not None and top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None and top_p < 1:
        p, order = logits.softmax(-1).sort(descending=True)
        enough = p.cumsum(-1) - p >= top_p  # the more likely tokens suffice
        logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
