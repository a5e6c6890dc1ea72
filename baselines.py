"""
Other published residual rules to compare AttnRes with, in the shape of model.py's: forward(h, sublayers) -> h.

    rule         what is learned about depth                                          at initialisation
    static       AttnRes whose weights do not look at the input: one softmax a read   the plain residual
    denseformer  after each transformer block a weighted sum of all outputs so far    the plain residual
    hc           4 streams, mixed by small dynamic matrices (Hyper-Connections)       the plain residual
    mhc          the same, the mixing between streams made doubly stochastic          close to it, not equal
    highway      a gate between keeping h and taking f(h)                             mostly keeps h
    ddl          a step along one direction of h (Deep Delta Learning)                a step of its own kind

Importing this file adds them to model.RESIDUALS; model.py does not know it. Nothing here draws from the random number
generator: the same seed gives the same sublayers in every mode. All parameters live under `residual.` and are therefore
never weight-decayed; where a paper decays them, its class says so. L = 2 * n_layer sublayers, D = n_embd, n = STREAMS.
"""
import math

import torch
import torch.nn as nn

from model import RESIDUALS

STREAMS = 4  # of HC and mHC
SINKHORN = 20  # steps of column and row normalisation in mHC


def rms_norm(x, eps):
    """ x / rms(x) over the last dimension, in float32 at least """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def mix(A, H):
    """ A H, (n, n) by (n, D) a token, in float32 also under autocast: H is the residual stream: never rounded """
    with torch.autocast(H.device.type, enabled=False):
        return A @ H.to(A.dtype)


class Baseline(nn.Module):
    """ Sizes that every rule needs, and one line about it. """
    def __init__(self, config):
        super().__init__()
        self.L, self.D, self.eps = 2 * config.n_layer, config.n_embd, config.norm_eps

    def describe(self):
        return self.__doc__.strip().split('\n')[0]


class Static(Baseline):
    """ h_l = sum_i softmax(logit_l)_i v_i

    AttnRes without looking: the control that shows whether input-dependent weights matter. The paper's ablation does
    not say whether its static weights were normalised (1.749 against 1.737); here they are: only the input is gone.
    """
    S = 1  # every output stays a source of its own, as in Full

    def __init__(self, config):
        super().__init__(config)
        self.logit = nn.Parameter(torch.zeros(self.L + 1, self.L + 1))  # row l uses its first l + 1

    def forward(self, h, sublayers):
        def read(l):
            return sum(a * v_i for a, v_i in zip(self.logit[l, :l + 1].softmax(0), v, strict=True)).to(h.dtype)
        v = (h,)
        for l, f in enumerate(sublayers):
            v = (*v, f(read(l)))
        return read(self.L)


class DenseFormer(Baseline):
    """ y_i = sum_j a_ij x_j,   x_0 = embedding, x_j = y_{j-1} after transformer block j

    arXiv 2402.02622. Inside a transformer block the plain residual stays; the weights are free, a_ii = 1 at first. The
    authors' code decays them; here nothing of a residual rule is decayed.
    """
    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.eye(config.n_layer + 1)[1:].clone())  # (n_layer, n_layer + 1)

    def forward(self, h, sublayers):
        x = (h,)
        for a, pair in zip(self.weight, zip(sublayers[::2], sublayers[1::2], strict=True), strict=True):
            for f in pair:
                h = h + f(h)
            x = (*x, h)
            h = sum(a_j * x_j for a_j, x_j in zip(a, x, strict=False))
        return h


class Highway(Baseline):
    """ h <- (1 - g) h + g f(h),   g = sigmoid(w_l . h + b_l), one number a token

    arXiv 1505.00387 with scalar gates, as in the paper's table of rules. b = -2 at first: most of h is kept.
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


class HyperConnections(Baseline):
    """ H <- A_r H + B f(A_m H),   H: 4 streams

    arXiv 2409.19606, dynamic: A_m, B (n) and A_r (n, n) are learned matrices plus 0.01 tanh(norm(H) W), W = 0 at first.
    The streams start as copies of the embedding and are summed at the end; norm has no gain. The paper's rescaling of
    output projections is left out: the initialisation is the same in all modes.
    """
    def __init__(self, config):
        super().__init__(config)
        n = STREAMS
        self.static_m = nn.Parameter(torch.eye(n)[torch.arange(self.L) % n])  # (L, n): sublayer l reads stream l mod n
        self.static_r = nn.Parameter(torch.eye(n).repeat(self.L, 1, 1))  # (L, n, n)
        self.static_b = nn.Parameter(torch.ones(self.L, n))
        self.dynamic = nn.Parameter(torch.zeros(self.L, self.D, n + 2))  # a stream's columns: A_r (n), A_m, B
        self.scale = nn.Parameter(torch.full((self.L, 2), 0.01))  # of A's, of B

    def forward(self, h, sublayers):
        n = STREAMS
        H = h.unsqueeze(-2).expand(*h.shape[:-1], n, self.D)  # (B, T, n, D)
        for l, f in enumerate(sublayers):
            t = torch.tanh(rms_norm(H, self.eps) @ self.dynamic[l])  # (B, T, n, n + 2)
            A_r = self.static_r[l] + self.scale[l, 0] * t[..., :n].transpose(-1, -2)  # (B, T, n to, n from)
            A_m = self.static_m[l] + self.scale[l, 0] * t[..., n]  # (B, T, n)
            B = self.static_b[l] + self.scale[l, 1] * t[..., n + 1]
            y = f((A_m.unsqueeze(-1) * H).sum(-2).to(h.dtype))
            H = mix(A_r, H) + B.unsqueeze(-1) * y.unsqueeze(-2)
        return H.sum(-2).to(h.dtype)


class ManifoldHyperConnections(Baseline):
    """ x <- H_res x + H_post f(H_pre x),   H_res doubly stochastic, x: 4 streams

    arXiv 2512.24880. Each map is a learned bias plus 0.01 (norm(vec x) phi), phi = 0 at first; H_pre = sigmoid,
    H_post = 2 sigmoid, H_res = 20 Sinkhorn steps on exp. The biases start as in the code of mHC-lite's authors: +1 for
    stream l mod n and -1 for the others, H_res close to the identity (-8 off the diagonal). The streams start as copies
    of the embedding and are summed at the end. The paper decays phi; here nothing of a residual rule is decayed.
    """
    def __init__(self, config):
        super().__init__(config)
        n = STREAMS
        one = 2 * torch.eye(n)[torch.arange(self.L) % n] - 1  # (L, n)
        self.phi = nn.Parameter(torch.zeros(self.L, n * self.D, 2 * n + n * n))
        self.gain = nn.Parameter(torch.ones(self.L, n * self.D))  # of the norm
        self.gate = nn.Parameter(torch.full((self.L, 3), 0.01))
        self.pre, self.post = nn.Parameter(one.clone()), nn.Parameter(one.clone())
        self.res = nn.Parameter((8 * torch.eye(n) - 8).repeat(self.L, 1, 1))  # (L, n, n)

    def forward(self, h, sublayers):
        n = STREAMS
        x = h.unsqueeze(-2).expand(*h.shape[:-1], n, self.D)  # (B, T, n, D)
        for l, f in enumerate(sublayers):
            z = (rms_norm(x.flatten(-2), self.eps) * self.gain[l]) @ self.phi[l]  # (B, T, 2 n + n n)
            pre, post, res = z.split((n, n, n * n), dim=-1)
            pre = torch.sigmoid(self.gate[l, 0] * pre + self.pre[l])
            post = 2 * torch.sigmoid(self.gate[l, 1] * post + self.post[l])
            res = self.sinkhorn(self.gate[l, 2] * res.unflatten(-1, (n, n)) + self.res[l])
            y = f((pre.unsqueeze(-1) * x).sum(-2).to(h.dtype))
            x = mix(res, x) + post.unsqueeze(-1) * y.unsqueeze(-2)
        return x.sum(-2).to(h.dtype)

    @staticmethod
    def sinkhorn(log):
        """ exp(log), columns and rows normalised in turn until both sum to 1; in logarithms, so it never overflows """
        log = log.movedim((-2, -1), (0, 1)).contiguous()  # a softmax over a leading dimension is eight times as fast
        for _ in range(SINKHORN):
            log = log.log_softmax(0).log_softmax(1)
        return log.exp().movedim((0, 1), (-2, -1)).contiguous()


class DeepDelta(Baseline):
    """ h <- h + b k (v - k . h),   k = f(h)/|f(h)|,  b = 2 sigmoid(u_l . norm(h) + c_l),  v = 4 sigmoid(w_l . h + d_l)

    arXiv 2601.00417, one value a token: f gives a direction, h moves along it towards v; b = 1 and v = 2 at first. The
    authors' b looks at the sublayer's normed input; a rule does not see into its sublayers, so norm has no gain here.
    """
    def __init__(self, config):
        super().__init__(config)
        self.beta, self.value = (nn.Parameter(torch.zeros(self.L, self.D)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(self.L, 2))

    def forward(self, h, sublayers):
        for l, f in enumerate(sublayers):
            k = rms_norm(f(h), self.eps) / math.sqrt(self.D)  # (B, T, D), length 1
            b = 2 * torch.sigmoid((rms_norm(h, self.eps) * self.beta[l]).sum(-1, keepdim=True) + self.bias[l, 0])
            v = 4 * torch.sigmoid((h * self.value[l]).sum(-1, keepdim=True) + self.bias[l, 1])
            h = h + (b * k * (v - (k * h).sum(-1, keepdim=True))).to(h.dtype)
        return h


RESIDUALS |= {'static': Static, 'denseformer': DenseFormer, 'hc': HyperConnections, 'mhc': ManifoldHyperConnections,
              'highway': Highway, 'ddl': DeepDelta}
