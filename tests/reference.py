"""The second definition of the mathematics: the whole network in float64, in explicit loops.

It imports nothing from the project and none of torch.nn: every formula is written out, so that an error would have to
be made twice, in two different shapes, to pass unseen. The residual rules follow the paper's equations
(arXiv 2603.15031) literally: each read forms its sources anew, as sums over index sets, where model.py carries them
along.

Parameters come from a state dict with nanoGPT's names. Autograd runs through it, so it defines the gradients too.
"""
import math

import torch


def mean(x):
    """sum_i x_i / D over the last dimension, which stays as 1"""
    return x.sum(-1, keepdim=True) / x.shape[-1]


def softmax(scores):
    """exp(s_i) / sum_j exp(s_j) of a python list of equally shaped tensors -> list"""
    top = scores[0]
    for s in scores[1:]:
        top = torch.maximum(top, s)
    top = top.detach()  # any constant cancels; the maximum avoids overflow
    e = [torch.exp(s - top) for s in scores]
    total = e[0]
    for x in e[1:]:
        total = total + x
    return [x / total for x in e]


# ---------------------------------------------------------------------------------------------------------------------
# depth attention

def attend(sources, u, eps):
    """sum_i alpha_i v_i, alpha = softmax_i(u . RMSNorm(v_i)): paper eq. 2 to 4, u = query * key gain

    sources: list of (..., D); u: (D,) -> (..., D)
    """
    v = [s.double() for s in sources]
    u = u.double()
    scores = []
    for s in v:
        key = s / torch.sqrt(mean(s * s) + eps)
        scores.append((u * key).sum(-1, keepdim=True))
    alpha = softmax(scores)
    return sum(a * s for a, s in zip(alpha, v, strict=True))


def index_sets(L, S):
    """B_1, B_2, ...: sublayers 0..L-1 in runs of S, the last one perhaps shorter (paper eq. 5)"""
    return [list(range(first, min(first + S, L))) for first in range(0, L, S)]


def sources_at(l, embedding, outputs, S, L):
    """[b_0, ..., b_{n-1}] and, unless l opens its block, b_n^{i-1} (paper eq. 6); l = L is the output aggregation"""
    sources = [embedding]
    for block in index_sets(L, S):
        done = [outputs[j] for j in block if j < l]
        if done:
            sources.append(sum(done[1:], start=done[0]))
    return sources


def depth_attention(h, sublayers, query, S, eps):
    """read, run and keep each sublayer's output; then aggregate

    h: embedding (B, T, D); sublayers: L callables; query: (L+1, D), gain folded in; S: sublayers a residual block,
    1 for Full -> what the final norm reads (B, T, D)
    """
    L = len(sublayers)
    embedding, outputs = h.double(), []
    for l in range(L):
        read = attend(sources_at(l, embedding, outputs, S, L), query[l], eps)
        outputs.append(sublayers[l](read))
    return attend(sources_at(L, embedding, outputs, S, L), query[L], eps)


def follow(verbs, outputs, query, eps):
    """the reads of a script of (verb, number): push and add take the next output, drop and read a number

    outputs[k] is called with the latest read, or None
    """
    sources, reads, outputs = [], [], iter(outputs)
    for verb, number in verbs:
        if verb == 'read':
            reads.append(attend(sources, query[number], eps))
        elif verb == 'drop':
            sources = sources[:number] + sources[number + 1:]
        else:
            y = next(outputs)(reads[-1] if reads else None).double()
            sources = [*sources, y] if verb == 'push' else [*sources[:-1], sources[-1] + y]
    return reads


# ---------------------------------------------------------------------------------------------------------------------
# the two-phase computation of a residual block (paper, Algorithm 1)

def attend_with_stats(queries, sources, eps):
    """for each query: (o, m, l), o = sum_i exp(s_i - m) v_i, m = max_i s_i, l = sum_i exp(s_i - m)

    queries: list of (D,); sources: list of (..., D) -> o (..., D), m and l (..., 1)
    """
    keys = [v / torch.sqrt(mean(v * v) + eps) for v in sources]
    results = []
    for w in queries:
        scores = [(w * key).sum(-1, keepdim=True) for key in keys]
        m = scores[0]
        for s in scores[1:]:
            m = torch.maximum(m, s)
        m = m.detach()  # it cancels in the end
        weights = [torch.exp(s - m) for s in scores]
        o = sum(a * v for a, v in zip(weights, sources, strict=True))
        results.append((o, m, sum(weights)))
    return results


def merge(first, second):
    """two (o, m, l) of disjoint sources as one read: the softmax over the sources of both"""
    (o1, m1, l1), (o2, m2, l2) = first, second
    m = torch.maximum(m1, m2)
    return (torch.exp(m1 - m) * o1 + torch.exp(m2 - m) * o2) / (torch.exp(m1 - m) * l1 + torch.exp(m2 - m) * l2)


def two_phase(h, sublayers, query, S, eps):
    """depth_attention, computed a residual block at a time; arguments and result as there"""
    L, finished, query = len(sublayers), [h.double()], query.double()
    for block in index_sets(L, S):
        # phase 1: the finished blocks and the embedding are read once, for all queries of this block together
        inter = attend_with_stats([query[l] for l in block], finished, eps)
        # phase 2: sublayer after sublayer; the sum in progress is the one source that changed
        partial = None
        for l, (o, m, total) in zip(block, inter, strict=True):
            if partial is None:
                read = o / total
            else:
                read = merge((o, m, total), attend_with_stats([query[l]], [partial], eps)[0])
            y = sublayers[l](read)
            partial = y if partial is None else partial + y
        finished.append(partial)
    (o, m, total), = attend_with_stats([query[L]], finished, eps)
    return o / total


def standard(h, sublayers):
    """h_l = h_1 + sum_{i<l} f_i(h_i)"""
    embedding, outputs = h.double(), []
    for f in sublayers:
        outputs.append(f(embedding + sum(outputs)))
    return embedding + sum(outputs)


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2

def linear(x, weight, bias):
    y = x @ weight.T
    return y if bias is None else y + bias


def layer_norm(x, weight, bias, eps):
    centred = x - mean(x)
    y = centred / torch.sqrt(mean(centred * centred) + eps) * weight
    return y if bias is None else y + bias


def gelu(x):
    """GPT-2's tanh form"""
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def attention(x, p, prefix, n_head):
    """causal, a head, a query position and a key position at a time: (B, T, D) -> (B, T, D)"""
    B, T, D = x.shape
    size = D // n_head
    qkv = linear(x, p[prefix + 'c_attn.weight'], p.get(prefix + 'c_attn.bias'))
    heads = []
    for k in range(n_head):
        q, key, value = (qkv[:, :, part * D + k * size:part * D + (k + 1) * size] for part in range(3))
        rows = []
        for t in range(T):
            alpha = softmax([(q[:, t] * key[:, j]).sum(-1, keepdim=True) / math.sqrt(size) for j in range(t + 1)])
            rows.append(sum(a * value[:, j] for j, a in enumerate(alpha)))
        heads.append(torch.stack(rows, dim=1))
    return linear(torch.cat(heads, dim=-1), p[prefix + 'c_proj.weight'], p.get(prefix + 'c_proj.bias'))


def mlp(x, p, prefix):
    x = gelu(linear(x, p[prefix + 'c_fc.weight'], p.get(prefix + 'c_fc.bias')))
    return linear(x, p[prefix + 'c_proj.weight'], p.get(prefix + 'c_proj.bias'))


def sublayers_of(p, cfg):
    """f_0 .. f_{L-1}: attention and MLP by turns, each with its own norm before it"""
    def attn(x, name):
        x = layer_norm(x, p[name + 'ln_1.weight'], p.get(name + 'ln_1.bias'), cfg['norm_eps'])
        return attention(x, p, name + 'attn.', cfg['n_head'])

    def feed(x, name):
        x = layer_norm(x, p[name + 'ln_2.weight'], p.get(name + 'ln_2.bias'), cfg['norm_eps'])
        return mlp(x, p, name + 'mlp.')

    fs = []
    for i in range(cfg['n_layer']):
        for kind in (attn, feed):
            fs.append(lambda x, kind=kind, name=f'transformer.h.{i}.': kind(x, name))
    return fs


def cross_entropy(logits, targets):
    """mean over positions of log sum_v exp(logit_v) - logit_target"""
    V = logits.shape[-1]
    losses = []
    for row, t in zip(logits.reshape(-1, V), targets.reshape(-1).tolist(), strict=True):
        top = row.max().detach()
        losses.append(top + torch.log(torch.exp(row - top).sum()) - row[t])
    return sum(losses) / len(losses)


def logits_and_loss(state_dict, cfg, idx, targets=None):
    """the network: idx (B, T) -> logits (B, T, V), loss or None

    cfg: dict with n_layer, n_head, norm_eps, residual and, in block mode, residual_blocks
    """
    p = {name: value.double() for name, value in state_dict.items()}
    wte, wpe = p['transformer.wte.weight'], p['transformer.wpe.weight']
    h = torch.stack([torch.stack([wte[token] + wpe[t] for t, token in enumerate(row)]) for row in idx.tolist()])
    fs = sublayers_of(p, cfg)
    if cfg['residual'] == 'standard':
        h = standard(h, fs)
    else:
        u = p['residual.query'] * p['residual.key_gain']
        S = {'full': 1, 'block': math.ceil(len(fs) / cfg.get('residual_blocks', 1))}[cfg['residual']]
        h = depth_attention(h, fs, u, S, cfg['norm_eps'])
    h = layer_norm(h, p['transformer.ln_f.weight'], p.get('transformer.ln_f.bias'), cfg['norm_eps'])
    logits = h @ wte.T  # the head is the embedding
    return logits, None if targets is None else cross_entropy(logits, targets)


# ---------------------------------------------------------------------------------------------------------------------
# the ablations of the AttnRes paper (its Table 4): oracle(embedding, sublayers, u, eps) -> what the final norm reads.
# u: query * key gain, a row for each read. A token, a source, a head at a time.

def by_token(h, sublayers, sources, weigh):
    """every read made anew from its sources: h_l = sum_i alpha_i v_i, token by token

    sources(l, outputs) -> the list of (B, T, D) that read l sees; weigh(l, its rows for one token) -> their weights,
    or a list of weights for each of D channels
    """
    embedding, outputs = h.double(), []

    def read(l):
        seen = sources(l, embedding, outputs)
        rows = []
        for b in range(h.shape[0]):
            tokens = []
            for t in range(h.shape[1]):
                v = [s[b, t] for s in seen]
                alpha = weigh(l, v)
                tokens.append(sum(a * x for a, x in zip(alpha, v, strict=True)))
            rows.append(torch.stack(tokens))
        return torch.stack(rows)

    for l, f in enumerate(sublayers):
        outputs.append(f(read(l)))
    return read(len(sublayers))


def all_outputs(l, embedding, outputs):
    return [embedding] + outputs[:l]


def unit_key(v, eps):
    return v / torch.sqrt((v * v).sum() / len(v) + eps)


def no_key_norm(h, sublayers, u, eps):
    """alpha_i = exp(u_l . v_i) / sum_j exp(u_l . v_j)"""
    def weigh(l, v):
        return softmax([(u[l] * x).sum() for x in v])

    return by_token(h, sublayers, all_outputs, weigh)


def sigmoid_weights(h, sublayers, u, eps):
    """alpha_i = 1 / (1 + exp(-u_l . RMSNorm(v_i)))"""
    def weigh(l, v):
        return [1 / (1 + torch.exp(-(u[l] * unit_key(x, eps)).sum())) for x in v]

    return by_token(h, sublayers, all_outputs, weigh)


def input_query(h, sublayers, u, eps):
    """alpha_i = softmax_i(q . RMSNorm(v_i)), q_a = sum_b W_ab RMSNorm(newest source)_b; u[l] = W (D, D)"""
    def weigh(l, v):
        newest = unit_key(v[-1], eps)
        q = [sum(u[l][a, b] * newest[b] for b in range(len(newest))) for a in range(len(newest))]
        scores = []
        for x in v:
            key = unit_key(x, eps)
            scores.append(sum(q[a] * key[a] for a in range(len(q))))
        return softmax(scores)

    return by_token(h, sublayers, all_outputs, weigh)


def heads(h, sublayers, u, eps, H, S):
    """depth attention over residual blocks of S, for each of H groups of channels apart; keys are normed by group"""
    L, size = len(sublayers), h.shape[-1] // H

    def sources(l, embedding, outputs):
        return sources_at(l, embedding, outputs, S, L)

    def weigh(l, v):
        channels = [[] for _ in v]
        for k in range(H):
            group = slice(k * size, (k + 1) * size)
            alpha = softmax([(u[l][group] * unit_key(x[group], eps)).sum() for x in v])
            for i in range(len(v)):
                channels[i] += [alpha[i]] * size
        return [torch.stack(c) for c in channels]

    return by_token(h, sublayers, sources, weigh)


def window(h, sublayers, u, eps, size):
    """AttnRes over the embedding and the last `size` outputs"""
    def sources(l, embedding, outputs):
        return [embedding] + [outputs[i] for i in range(max(0, l - size), l)]

    def weigh(l, v):
        return softmax([(u[l] * unit_key(x, eps)).sum() for x in v])

    return by_token(h, sublayers, sources, weigh)
