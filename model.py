"""
A GPT whose residual connection is a choice: standard, or Attention Residuals (AttnRes, arXiv
2603.15031), Full or Block.

The network is GPT-2's, written as in nanoGPT. It differs in one place, apart from a smaller
norm_eps: a transformer block adds nothing to anything. It hands out its two *sublayers*, and a
*residual rule* runs all L = 2 * n_layer of them: the rule decides what each sublayer reads and what
becomes of its output. The three rules stand together below. Nothing else knows which is at work.

Read from top to bottom. Shapes stand at line ends: B sequences, T tokens, D = n_embd, n sources.
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
    # model
    n_ctx: int = 1024  # context length in tokens
    vocab_size: int = 50304  # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12  # transformer blocks; each has two sublayers, attention and MLP
    n_head: int = 12  # attention heads
    n_embd: int = 768  # width D
    dropout: float = 0.0  # on embedding, attention weights and sublayer outputs
    bias: bool = True  # biases in Linear and LayerNorm, as in GPT-2
    norm_eps: float = 1e-10  # of all norms, those of the depth keys too; 1e-5 with GPT-2's weights
    residual: str = 'standard'  # residual rule: standard | full | block, or one of baselines.py
    residual_blocks: int = 8  # block mode: N residual blocks or fewer, of ceil(L / N) sublayers
    scale_proj_init: bool = True  # initialise output projections smaller, by 1/sqrt(2 * n_layer)
    # machine
    kernel: str = 'auto'  # how depth attention runs: auto | reference | torch | triton
    recompute: bool = False  # recompute each sublayer in the backward pass, to save memory

    def __post_init__(self):
        def check(key, ok, allowed):
            if not ok:
                raise ValueError(f'{key}={getattr(self, key)!r}: must be {allowed}')

        for f in fields(self):
            kinds = (int, float) if f.type is float else (f.type,)
            check(f.name, type(getattr(self, f.name)) in kinds, f'of type {f.type.__name__}')
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
# The residual rules. forward(h, sublayers): h (B, T, D) is the embedding, sublayers are the L
# functions f_0 .. f_{L-1}, (B, T, D) -> (B, T, D). Each has its own pre-norm and adds nothing.
# What forward returns goes to the final norm.

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


class Sources:
    """ What was produced so far in a forward pass, and attention over it (paper eq. 2 to 4):

        h_l = sum_i alpha_i v_i,   alpha = softmax over i of  w_l . RMSNorm(v_i)

    Read l is the input of sublayer l, read L that of the final norm. Each token attends to its own
    sources alone. w (L + 1, D) is query * key_gain, so `score` may norm without a gain. There is no
    1/sqrt(D) and no projection. Scores and weights are float32, also under autocast.

    kernels.py computes the same faster. First both run on a small example of up to 9 sources. If
    their numbers differ, this class runs. What matters only beyond 9 needs kernel=reference.
    """
    def __init__(self, w, eps):
        self.w, self.eps = w, eps
        self.v, self.scores = [], []  # of each source, oldest first: (B, T, D) and (B, T, L + 1)
        self.on_read = None

    def __len__(self):
        return len(self.v)

    def score(self, v):
        """ w_l . RMSNorm(v) for all reads l, (B, T, L + 1), computed as (w_l . v) / rms(v).

        The queries do not depend on the input, so one product serves all reads of a source.
        """
        v = v.to(self.w.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return F.linear(v, self.w) * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)

    def push(self, y):
        """ y (B, T, D) becomes the newest source. """
        self.v.append(y)
        self.scores.append(self.score(y))

    def add(self, y):
        """ The newest source becomes itself + y. Before a rule pushes, that is the embedding. """
        y = self.v.pop() + y
        self.scores.pop()
        self.push(y)

    def drop(self, i):
        """ Source i, counted from the oldest, is forgotten: for rules with a window. """
        del self.v[i], self.scores[i]

    def weights(self, l):
        """ alpha of read l, (n, B, T): it sums to 1 over the n sources. """
        return torch.stack([score[..., l] for score in self.scores]).softmax(0)

    def read(self, l):
        """ h_l (B, T, D), the weighted mean of the sources. """
        alpha = self.weights(l)
        if self.on_read:
            self.on_read(l, alpha.detach())
        h = sum(a.unsqueeze(-1) * v for a, v in zip(alpha, self.v, strict=True))
        return h.to(self.v[0].dtype)


class AttnRes(nn.Module):
    """ What Full and Block share: a pseudo-query and a key gain for each sublayer and the output.

    Queries start at zero. Then all weights are equal, and a read is (embedding + all outputs) / n:
    the standard residual stream, divided by the number of sources. The norm that every sublayer
    begins with removes the factor 1 / n. So at initialisation all three rules are the same
    function (up to norm_eps). Row 0 of the queries reads a single source, so its gradient is zero;
    it is there so that row l belongs to sublayer l.
    """
    Sources = Sources  # a class attribute: a subclass may name sources of its own

    def __init__(self, config):
        super().__init__()
        self.L = 2 * config.n_layer  # sublayers
        self.S = self.residual_block_length(config)  # of them in a residual block
        self.query = nn.Parameter(torch.zeros(self.L + 1, config.n_embd))
        self.key_gain = nn.Parameter(torch.ones(self.L + 1, config.n_embd))
        self.eps = config.norm_eps
        self.kernel = kernels.checked_kernel(config.kernel, self.Sources)  # may be 'reference'
        self.on_read = None  # set to a function, it is called with l and alpha at every read

    def residual_block_length(self, config):
        return 1  # every output is a source of its own

    def sources(self, h):
        """ The sources when a forward pass begins: the embedding h (B, T, D) alone. """
        at_least_float32 = torch.promote_types(h.dtype, torch.float32)
        w = (self.query * self.key_gain).to(at_least_float32)
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))  # as the other sources will be
        v = kernels.new_sources(self.kernel, self.Sources, w, self.eps, h)
        v.on_read = self.on_read
        v.push(h)
        return v

    def describe(self):
        n = math.ceil(self.L / self.S)
        last = (self.L - 1) % self.S + 1  # sublayers in the last residual block
        text = f'{self.L} sublayers in {n} residual blocks of {self.S}'
        return text if last == self.S else f'{text}, the last of {last}'


class FullAttnRes(AttnRes):
    """ h_l = sum_i alpha_{i->l} v_i,   v_0 = embedding, v_{l+1} = f_l(h_l) """
    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            v.push(f(v.read(l)))
        return v.read(self.L)


class BlockAttnRes(AttnRes):
    """ Like Full, but a source is the sum of a residual block of S outputs. The newest grows. """
    def residual_block_length(self, config):
        return math.ceil(2 * config.n_layer / config.residual_blocks)

    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            y = f(v.read(l))
            if l % self.S == 0:
                v.push(y)  # a residual block begins
            else:
                v.add(y)  # and goes on
        return v.read(self.L)


# A rule of your own needs __init__(config), forward(h, sublayers), describe() and a name here.
RESIDUALS = {'standard': Standard, 'full': FullAttnRes, 'block': BlockAttnRes}


# -----------------------------------------------------------------------------
# GPT-2's parts.

def layer_norm(config):
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class Cache:
    """ Keys and values of one attention sublayer, for decoding token by token """
    def __init__(self, n_ctx):
        self.n_ctx, self.length = n_ctx, 0

    def extend(self, k, v):
        if self.length == 0:
            self.kv = k.new_empty(2, *k.shape[:2], self.n_ctx, k.size(-1))  # (2, B, H, n_ctx, D/H)
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
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, D // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
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


class Block(nn.Module):
    """ A transformer block: two sublayers. The residual rule decides how they are joined. """
    def __init__(self, config):
        super().__init__()
        self.ln_1 = layer_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = layer_norm(config)
        self.mlp = MLP(config)

    def sublayers(self, cache=None):
        def attention(h):
            return self.attn(self.ln_1(h), cache)

        def mlp(h):
            return self.mlp(self.ln_2(h))

        return [attention, mlp]


class GPT(nn.Module):
    """ Embeddings, the residual rule over all sublayers, a norm, logits from the embedding """
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.n_ctx, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=layer_norm(config),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied, as in GPT-2
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                small = config.scale_proj_init and name.endswith('c_proj')
                std = 0.02 / math.sqrt(2 * config.n_layer) if small else 0.02
                nn.init.normal_(module.weight, std=std)
                if getattr(module, 'bias', None) is not None:
                    nn.init.zeros_(module.bias)
        # A rule draws no random numbers: the same seed gives the same weights in every mode.
        self.residual = RESIDUALS[config.residual](config)

    def n_params(self):
        """ The number of parameters, the tied embedding counted once. """
        return sum(p.numel() for p in self.parameters())

    def sublayers(self, caches=None):
        """ The L = 2 * n_layer functions f_l, in order. """
        caches = caches or [None] * self.config.n_layer
        fs = []
        for block, cache in zip(self.transformer.h, caches, strict=True):
            fs += block.sublayers(cache)
        if self.config.recompute and self.training:
            fs = [partial(checkpoint, f, use_reentrant=False) for f in fs]
        return fs

    def forward(self, idx, targets=None, caches=None):
        """ Logits (B, T, vocab_size) of tokens idx (B, T); with targets (B, T) the mean loss, too.

        A target of -1 does not count. caches, one Cache for each transformer block, hold the
        tokens before idx and take these in.
        """
        T = idx.size(1)
        past = caches[0].length if caches else 0
        if past + T > self.config.n_ctx:
            raise ValueError(f'idx has {past + T} tokens: n_ctx={self.config.n_ctx} is the most')
        pos = torch.arange(past, past + T, device=idx.device)
        h = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, D)
        h = self.residual(self.transformer.drop(h), self.sublayers(caches))
        logits = self.lm_head(self.transformer.ln_f(h))  # (B, T, vocab_size)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        """ AdamW. Matrices and embeddings decay; gains, biases and the residual rule's do not. """
        decayed, others = [], []
        for name, p in self.named_parameters():
            decays = p.dim() >= 2 and not name.startswith('residual.')
            (decayed if decays else others).append(p)
        groups = [{'params': decayed, 'weight_decay': weight_decay},
                  {'params': others, 'weight_decay': 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=tuple(betas), fused=True)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None,
               generator=None):
        """ Yields max_new_tokens times the next token of each row of idx (B, T), as (B, 1).

        Call model.eval() first, or dropout is at work.
        temperature 0 takes the most likely token. top_k keeps the k most likely tokens, top_p the
        smallest set of them with that probability. Ids from n_vocab on are padding and never
        drawn. generator, if given, is on the CPU. Keys and values are cached while the window has
        room. Positions are absolute, so a full window is cut to its last n_ctx / 2 tokens and read
        anew. A prompt longer than n_ctx is cut to its last n_ctx tokens first.
        """
        check_sampling(self.config, idx, max_new_tokens, temperature, top_k, top_p, n_vocab)
        n_ctx = self.config.n_ctx
        window, caches, new = idx[:, -n_ctx:], None, None
        for _ in range(max_new_tokens):
            if caches is None or caches[0].length == n_ctx:
                if caches is not None:
                    window = window[:, -max(1, n_ctx // 2):]
                caches, new = [Cache(n_ctx) for _ in self.transformer.h], window
            logits = self(new, caches=caches)[0][:, -1].float()  # (B, vocab_size)
            new = pick(logits[:, :n_vocab], temperature, top_k, top_p, generator)
            window = torch.cat((window, new), dim=1)
            yield new

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None,
                 generator=None):
        """ idx (B, T) continued by max_new_tokens tokens, (B, T + max_new_tokens). See stream. """
        new = self.stream(idx, max_new_tokens, temperature, top_k, top_p, n_vocab, generator)
        return torch.cat([idx, *new], dim=1)

    @classmethod
    def from_checkpoint(cls, path, device='cpu', kernel='auto'):
        """ The model of a checkpoint file, or of a folder's best.pt or ckpt.pt, in eval mode. """
        import weights
        return weights.from_checkpoint(path, device, kernel)

    @classmethod
    def from_pretrained(cls, name_or_dir, residual='standard', **overrides):
        """ GPT-2 under any rule, in eval mode; overrides: what of GPTConfig it leaves open. """
        import weights
        return weights.from_pretrained(name_or_dir, residual, **overrides)

    def save_pretrained(self, folder):
        """ Writes a folder that transformers' GPT2LMHeadModel loads. Standard mode only. """
        import weights
        weights.save_pretrained(self, folder)


def check_sampling(config, idx, max_new_tokens, temperature, top_k, top_p, n_vocab):
    """ ValueError names the first setting that stream cannot use. """
    def is_int(value):
        return type(value) is int

    def is_number(value):
        return type(value) in (int, float)

    most = config.vocab_size
    for key, value, ok, allowed in (
        ('idx', tuple(idx.shape), idx.dim() == 2 and idx.size(1) > 0, 'tokens (B, T) with T > 0'),
        ('max_new_tokens', max_new_tokens, is_int(max_new_tokens) and max_new_tokens >= 0,
         'an integer from 0'),
        ('temperature', temperature, is_number(temperature) and 0 <= temperature < math.inf,
         '0 (greedy) or a positive number'),
        ('top_k', top_k, top_k is None or is_int(top_k) and top_k >= 1, 'a whole number from 1'),
        ('top_p', top_p, top_p is None or is_number(top_p) and 0 < top_p <= 1, 'in (0, 1]'),
        ('n_vocab', n_vocab, n_vocab is None or is_int(n_vocab) and 1 <= n_vocab <= most,
         f'a whole number from 1 to {most}'),
    ):
        if not ok:
            raise ValueError(f'{key}={value!r}: must be {allowed}')


def pick(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """ One token (B, 1) drawn from softmax(logits / temperature) after the cuts; logits (B, V). """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    device, logits = logits.device, logits.cpu()  # some devices lack float64, used below
    logits = logits - logits.max(-1, keepdim=True).values
    logits = logits.double() / temperature  # float64 stays finite at any temperature
    if top_k is not None and top_k < logits.size(-1):
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None and top_p < 1:
        p, order = logits.softmax(-1).sort(descending=True)
        enough = p.cumsum(-1) - p >= top_p  # the more likely tokens alone reach top_p
        cut = torch.zeros_like(enough).scatter(-1, order, enough)
        logits = logits.masked_fill(cut, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).to(device)
