"""
Residual rules to compare AttnRes with: the ablations of its paper, and other published rules.

    rule         what it does                                             it starts as
    no_key_norm  Full AttnRes whose keys are not normalised               the plain residual
    sigmoid      Full AttnRes with a sigmoid in place of the softmax      the plain residual
    input_query  Full AttnRes with a query made of the newest output      the plain residual
    heads        Block AttnRes with a softmax for each group of channels  the plain residual
    window       Full AttnRes over the embedding and the last 8 outputs   the same if L <= 8
    static       Full AttnRes whose weights do not depend on the input    the plain residual
    denseformer  a weighted sum of all outputs after a transformer block  the plain residual
    hc           4 streams, mixed by small matrices (Hyper-Connections)   the plain residual
    mhc          hc with a doubly stochastic matrix between the streams   almost the plain one
    highway      a gate between keeping h and taking f(h)                 mostly h, kept
    ddl          a step along one direction of h (Deep Delta Learning)    a rule of its own

Importing this file adds the rules to model.RESIDUALS; model.py does not know them. They have the
shape of model.py's rules: forward(h, sublayers) -> h. None of them draws random numbers, so the
same seed gives the same sublayers in every mode. All their parameters are named `residual.` and
are never weight-decayed. Where a paper decays them, the docstring of its rule says so.

L = 2 * n_layer sublayers, D = n_embd, B sequences, T tokens, n sources or streams.
"""
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import RESIDUALS, BlockAttnRes, FullAttnRes, Sources

WINDOW = 8  # outputs that the rule `window` keeps, besides the embedding
HEADS = 4  # groups of channels in the rule `heads`
STREAMS = 4  # streams of HC and mHC
SINKHORN = 20  # steps of column and row normalisation in mHC


def rms_norm(x, eps):
    """ x / rms(x) over the last dimension, in float32 at least. """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def first_line(rule):
    """ The rule in one line: its equation. """
    return rule.__doc__.strip().split('\n')[0]


# -----------------------------------------------------------------------------
# The ablations of the AttnRes paper, down to Static. Each changes one thing. Those that weigh the
# sources in another way have a class of sources of their own, which no kernel replaces. The
# queries, or what stands for them, start at zero here too. "Table 4: x" is a loss in the paper, of
# a model that had 1.737 with Full AttnRes, 1.746 with Block AttnRes, 1.766 with the plain residual.

class RawKeySources(Sources):
    def score(self, v):
        """ w_l . v for all reads l, (B, T, L + 1) """
        v = v.to(self.w.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return F.linear(v, self.w)


class NoKeyNorm(FullAttnRes):
    """ h_l = sum_i alpha_i v_i,   alpha = softmax over i of  w_l . v_i

    A source with large numbers gets a large score, of either sign. The norm's gain is kept, since
    it acts only as a factor of the query: the norm is all that is gone. Table 4: 1.743.
    """
    Sources = RawKeySources
    describe = first_line


class SigmoidSources(Sources):
    def weights(self, l):
        """ alpha of read l, (n, B, T), each from 0 to 1 """
        return torch.stack([score[..., l] for score in self.scores]).sigmoid()


class Sigmoid(FullAttnRes):
    """ h_l = sum_i alpha_i v_i,   alpha_i = sigmoid(w_l . RMSNorm(v_i))

    The paper does not say whether it divides the weights by their sum. They stay undivided here,
    because the paper's point is that the sources of a softmax compete: these do not. All weights
    are 1/2 at first, and the pre-norm of the reader removes this factor. Table 4: 1.741.
    """
    Sources = SigmoidSources
    describe = first_line


class InputQuerySources(Sources):
    def score(self, v):
        """ Only the key, (B, T, D): the score needs the query, which is known at a read. """
        return rms_norm(v, self.eps)

    def weights(self, l):
        """ alpha of read l, (n, B, T) """
        with torch.autocast(self.w.device.type, enabled=False):
            query = F.linear(self.scores[-1], self.w[l])  # (B, T, D), by the matrix W_l
            return torch.stack([(query * key).sum(-1) for key in self.scores]).softmax(0)


class InputQuery(FullAttnRes):
    """ h_l = sum_i alpha_i v_i,   alpha = softmax over i of  (W_l RMSNorm(v_n)) . RMSNorm(v_i)

    The paper projects "the current hidden state" and does not say which one that is. Its
    pseudo-code uses this name for the newest source, here v_n. It is normalised, as it is wherever
    something reads it. W_l (D, D) takes the place of w_l and starts at zero: (L + 1) (D^2 - D)
    parameters more. Table 4: 1.731.
    """
    Sources = InputQuerySources
    describe = first_line

    def __init__(self, config):
        super().__init__(config)
        D = config.n_embd
        self.query = nn.Parameter(torch.zeros(self.L + 1, D, D))
        self.key_gain = nn.Parameter(torch.ones(self.L + 1, D, 1))


class HeadSources:
    """ Sources for each of HEADS groups of channels, side by side, that are used like one """
    def __init__(self, w, eps):
        self.heads = [Sources(part, eps) for part in w.chunk(HEADS, dim=-1)]
        self.on_read = None

    def push(self, y):
        for head, part in zip(self.heads, y.chunk(HEADS, dim=-1), strict=True):
            head.push(part)

    def add(self, y):
        for head, part in zip(self.heads, y.chunk(HEADS, dim=-1), strict=True):
            head.add(part)

    def weights(self, l):
        """ alpha of read l, (n, B, T), the mean over the heads """
        return torch.stack([head.weights(l) for head in self.heads]).mean(0)

    def read(self, l):
        if self.on_read:
            self.on_read(l, self.weights(l).detach())
        return torch.cat([head.read(l) for head in self.heads], dim=-1)


class Heads(BlockAttnRes):
    """ Block AttnRes for each of 4 groups of channels apart: 4 softmaxes a read

    The paper has 16 heads of 73 channels in Block AttnRes, and does not say whether a key is
    normalised as a whole or by heads. By heads here: each head is then an AttnRes of its own.
    Table 4: 1.752.
    """
    Sources = HeadSources
    describe = first_line


class Window(FullAttnRes):
    """ h_l = sum_i alpha_i v_i,   i: the embedding and the last 8 outputs

    The paper's sliding window, "1 + 8". An output that leaves the window is lost to all later
    reads, so this is the plain residual at first only while no output has left. Table 4: 1.764.
    """
    describe = first_line

    def forward(self, h, sublayers):
        v = self.sources(h)
        for l, f in enumerate(sublayers):
            v.push(f(v.read(l)))
            if len(v) > 1 + WINDOW:
                v.drop(1)  # source 0 is the embedding
        return v.read(self.L)


class Baseline(nn.Module):
    """ The sizes that every rule below needs """
    describe = first_line

    def __init__(self, config):
        super().__init__()
        self.L, self.D, self.eps = 2 * config.n_layer, config.n_embd, config.norm_eps


class Static(Baseline):
    """ h_l = sum_i alpha_i v_i,   alpha = softmax over i of  logit_li

    It shows whether the weights must depend on the input. The paper calls its weights learned
    numbers and does not say whether a softmax is taken of them. It is taken here: then nothing
    else differs from Full AttnRes. Table 4: 1.749.
    """
    S = 1  # every output stays a source of its own, as in Full

    def __init__(self, config):
        super().__init__(config)
        self.logit = nn.Parameter(torch.zeros(self.L + 1, self.L + 1))  # row l uses its first l + 1

    def read(self, l, v):
        alpha = self.logit[l, :l + 1].softmax(0)
        h = sum(a * v_i for a, v_i in zip(alpha, v, strict=True))
        return h.to(v[0].dtype)

    def forward(self, h, sublayers):
        v = [h]
        for l, f in enumerate(sublayers):
            v.append(f(self.read(l, v)))
        return self.read(self.L, v)


# -----------------------------------------------------------------------------
# Other published rules.

class DenseFormer(Baseline):
    """ y_i = sum_j a_ij x_j,   y_0 = x_0 = embedding, x_j = transformer block j of y_{j-1}

    arXiv 2402.02622. Inside a transformer block the plain residual stays. The weights are free
    numbers; a_ii = 1 and the others are 0 at first. The authors' code decays them.
    """
    def __init__(self, config):
        super().__init__(config)
        start = torch.eye(config.n_layer + 1)[1:].clone()
        self.weight = nn.Parameter(start)  # (n_layer, n_layer + 1)

    def forward(self, h, sublayers):
        x = [h]
        for i, a in enumerate(self.weight):
            for f in sublayers[2 * i:2 * i + 2]:
                h = h + f(h)
            x.append(h)
            h = sum(a_j * x_j for a_j, x_j in zip(a, x, strict=False))  # the first i + 2 of a
        return h


class Highway(Baseline):
    """ h <- (1 - g) h + g f(h),   g = sigmoid(w_l . h + b_l), one number for a token

    arXiv 1505.00387, with one number in place of a vector, as in the AttnRes paper's table of
    rules. b = -2 at first, so that most of h is kept.
    """
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(self.L, self.D))
        self.bias = nn.Parameter(torch.full((self.L,), -2.0))

    def forward(self, h, sublayers):
        for w, b, f in zip(self.gate, self.bias, sublayers, strict=True):
            g = torch.sigmoid((h * w).sum(-1, keepdim=True) + b)  # (B, T, 1)
            h = (1 - g) * h + g * f(h)
        return h


def mix(A, H):
    """ A H, (..., n, n) by (..., n, D). H is the residual stream: autocast must not round it. """
    with torch.autocast(H.device.type, enabled=False):
        return A @ H.to(A.dtype)


class HyperConnections(Baseline):
    """ H <- A_r H + B f(A_m H),   H: 4 streams

    arXiv 2409.19606, its dynamic form. A_m and B (n numbers each) and A_r (n, n) are learned
    numbers plus s tanh(norm(H) W), where s = 0.01 and W = 0 at first; norm has no gain. The streams
    start as copies of the embedding and are summed at the end. The paper rescales the initial
    output projections; this is left out, since the initialisation is the same in all modes here.
    """
    def __init__(self, config):
        super().__init__(config)
        n = STREAMS
        own_stream = torch.eye(n)[torch.arange(self.L) % n]  # sublayer l reads stream l mod n
        self.static_m = nn.Parameter(own_stream)  # (L, n)
        self.static_r = nn.Parameter(torch.eye(n).repeat(self.L, 1, 1))  # (L, n, n)
        self.static_b = nn.Parameter(torch.ones(self.L, n))
        self.dynamic = nn.Parameter(torch.zeros(self.L, self.D, n + 2))  # columns: A_r (n), A_m, B
        self.scale = nn.Parameter(torch.full((self.L, 2), 0.01))  # of A_r and A_m, of B

    def forward(self, h, sublayers):
        n = STREAMS
        H = h.unsqueeze(-2).expand(*h.shape[:-1], n, self.D)  # (B, T, n, D)
        for l, f in enumerate(sublayers):
            scale_a, scale_b = self.scale[l]
            t = torch.tanh(rms_norm(H, self.eps) @ self.dynamic[l])  # (B, T, n, n + 2)
            A_r = self.static_r[l] + scale_a * t[..., :n].transpose(-1, -2)  # (B, T, n to, n from)
            A_m = self.static_m[l] + scale_a * t[..., n]  # (B, T, n)
            B_l = self.static_b[l] + scale_b * t[..., n + 1]  # (B, T, n)
            y = f((A_m.unsqueeze(-1) * H).sum(-2).to(h.dtype))
            H = mix(A_r, H) + B_l.unsqueeze(-1) * y.unsqueeze(-2)
        return H.sum(-2).to(h.dtype)


class ManifoldHyperConnections(Baseline):
    """ x <- H_res x + H_post f(H_pre x),   H_res doubly stochastic, x: 4 streams

    arXiv 2512.24880. H_pre = sigmoid, H_post = 2 sigmoid and H_res = 20 Sinkhorn steps on exp of
    a learned bias plus g (norm(vec x) phi), where g = 0.01 and phi = 0 at first. The biases start
    as in the code of mHC-lite's authors: +1 for stream l mod n and -1 for the others; 0 on H_res's
    diagonal and -8 off it, which is close to the identity. The streams start as copies of the
    embedding and are summed at the end. The paper decays phi.
    """
    def __init__(self, config):
        super().__init__(config)
        n = STREAMS
        own_stream = 2 * torch.eye(n)[torch.arange(self.L) % n] - 1  # (L, n)
        self.phi = nn.Parameter(torch.zeros(self.L, n * self.D, 2 * n + n * n))
        self.gain = nn.Parameter(torch.ones(self.L, n * self.D))  # of the norm
        self.gate = nn.Parameter(torch.full((self.L, 3), 0.01))  # of H_pre, H_post, H_res
        self.pre = nn.Parameter(own_stream.clone())
        self.post = nn.Parameter(own_stream.clone())
        self.res = nn.Parameter((8 * torch.eye(n) - 8).repeat(self.L, 1, 1))  # (L, n, n)

    def forward(self, h, sublayers):
        n = STREAMS
        x = h.unsqueeze(-2).expand(*h.shape[:-1], n, self.D)  # (B, T, n, D)
        for l, f in enumerate(sublayers):
            gate_pre, gate_post, gate_res = self.gate[l]
            z = (rms_norm(x.flatten(-2), self.eps) * self.gain[l]) @ self.phi[l]
            pre, post, res = z.split((n, n, n * n), dim=-1)
            pre = torch.sigmoid(gate_pre * pre + self.pre[l])  # (B, T, n)
            post = 2 * torch.sigmoid(gate_post * post + self.post[l])  # (B, T, n)
            res = self.sinkhorn(gate_res * res.unflatten(-1, (n, n)) + self.res[l])  # (B, T, n, n)
            y = f((pre.unsqueeze(-1) * x).sum(-2).to(h.dtype))
            x = mix(res, x) + post.unsqueeze(-1) * y.unsqueeze(-2)
        return x.sum(-2).to(h.dtype)

    @staticmethod
    def sinkhorn(log):
        """ exp(log) with columns and rows normalised in turn, 20 times: both then sum to about 1.

        It works on logarithms, so nothing overflows. A softmax over a leading dimension is eight
        times as fast, so the matrix is moved there for the while.
        """
        log = log.movedim((-2, -1), (0, 1)).contiguous()
        for _ in range(SINKHORN):
            log = log.log_softmax(0).log_softmax(1)
        return log.exp().movedim((0, 1), (-2, -1)).contiguous()


class DeepDelta(Baseline):
    """ h <- h + b k (v - k . h),   k = f(h) / |f(h)|

    arXiv 2601.00417 with one value for a token. f gives a direction k, and h moves along it towards
    v = 4 sigmoid(w_l . h + d_l) by the fraction b = 2 sigmoid(u_l . norm(h) + c_l). At first b = 1
    and v = 2. The authors' b looks at the normed input of the sublayer. A rule does not see into
    its sublayers, so norm has no gain here.
    """
    def __init__(self, config):
        super().__init__(config)
        self.beta = nn.Parameter(torch.zeros(self.L, self.D))
        self.value = nn.Parameter(torch.zeros(self.L, self.D))
        self.bias = nn.Parameter(torch.zeros(self.L, 2))

    def forward(self, h, sublayers):
        for l, f in enumerate(sublayers):
            k = rms_norm(f(h), self.eps) / math.sqrt(self.D)  # (B, T, D), length 1
            beta = (rms_norm(h, self.eps) * self.beta[l]).sum(-1, keepdim=True)
            value = (h * self.value[l]).sum(-1, keepdim=True)
            b = 2 * torch.sigmoid(beta + self.bias[l, 0])  # (B, T, 1)
            v = 4 * torch.sigmoid(value + self.bias[l, 1])  # (B, T, 1)
            along = (k * h).sum(-1, keepdim=True)
            h = h + (b * k * (v - along)).to(h.dtype)
        return h


RESIDUALS |= {
    'no_key_norm': NoKeyNorm,
    'sigmoid': Sigmoid,
    'input_query': InputQuery,
    'heads': Heads,
    'window': Window,
    'static': Static,
    'denseformer': DenseFormer,
    'hc': HyperConnections,
    'mhc': ManifoldHyperConnections,
    'highway': Highway,
    'ddl': DeepDelta,
}
