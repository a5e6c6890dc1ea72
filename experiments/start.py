"""
The start of training: what the queries do in the first steps, by recipe. A study, not a verb.

    python -m experiments.start

Every recipe trains the same network on the same batches of enwik8. Finished runs are kept in
out/start, so the same command goes on where it was stopped. All together make assets/start.json.
"""
import hashlib
import json
import math
from dataclasses import dataclass
from statistics import mean

import torch
from torch import nn

from config.machine import pick_device
from data.batches import Data
from experiments.common import ROOT, environment, write_json
from experiments.runs import RunsConfig, settings
from model import GPT
from train import learning_rate

SETTINGS = ['--dataset=enwik8', '--max_iters=600', '--eval_interval=50', '--eval_iters=12']
SEEDS = 1337, 1338
ALSO_MEASURED_AT = 10, 20, 30, 40, 70


@dataclass
class Recipe:
    """ How a run differs from the others. The rule's parameters are its queries and key gains. """
    residual: str = 'full'
    warmup_iters: int = 100
    beta2: float = 0.95
    rule_rate: float = 1.0  # their learning rate, as a part of that of the others
    rule_eps: float = 1e-8  # Adam's eps for them
    rule_from: int = 0  # the step at which they begin to learn


RECIPES = {
    'standard': Recipe('standard'),
    'standard, warm-up 300': Recipe('standard', warmup_iters=300),
    'Block': Recipe('block'),
    'Block, warm-up 300': Recipe('block', warmup_iters=300),
    'Full': Recipe(),
    'Full, warm-up 300': Recipe(warmup_iters=300),
    'Full, beta2 0.99': Recipe(beta2=0.99),
    'Full, queries from step 100': Recipe(rule_from=100),
    'Full, rate of the queries / 10': Recipe(rule_rate=0.1),
    'Full, Adam eps of the queries 1e-4': Recipe(rule_eps=1e-4),
}


class Watch:
    """ What is measured while a model trains: lists of numbers by name, an entry a record.

    Without queries, all but the loss and the gradients is NaN.
    """
    def __init__(self, model, data):
        self.model, self.data, self.rule = model, data, model.residual
        self.records = {key: [] for key in (
            'step', 'validation loss', 'norm of the queries', 'largest change of a score in a step',
            'entropy of the weights', 'gradient norm, first sublayer / last')}

    @torch.no_grad()
    def record(self, step, change, gradients):
        """ change: that of w = query * key_gain in the step before, or None. gradients: the norm
        of those of the first sublayer over that of the last.
        """
        entropies, norm, largest = [], math.nan, math.nan

        def look(l, alpha):  # alpha (n, B, T); an entropy of 1: equal weights
            if len(alpha) > 1:
                entropy = -(alpha * alpha.clamp_min(1e-30).log()).sum(0).mean()
                entropies.append(entropy.item() / math.log(len(alpha)))

        self.rule.on_read = look
        self.model.eval()
        losses = [self.model(x, y)[1].item() for x, y in self.data.val_batches()]
        self.model.train()
        self.rule.on_read = None
        if change is not None:
            norm = w_of(self.rule)[1:].norm(dim=1).mean().item()
            # The keys have length sqrt(D), so no score changes by more than this.
            largest = change[1:].norm(dim=1).mean().item() * change.size(1) ** 0.5
        entropy = mean(entropies) if entropies else math.nan
        values = step, mean(losses), norm, largest, entropy, gradients
        for key, value in zip(self.records, values, strict=True):
            self.records[key].append(value)


def w_of(rule):
    """ query * key_gain (L + 1, D), a copy; None for a rule without queries. """
    if hasattr(rule, 'query'):
        return (rule.query * rule.key_gain).detach().clone()


def gradient_norm(module):
    return torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()


def first_steps(cfg, recipe):
    """ Trains as train.py does, but the rule's parameters by the recipe. Returns the records. """
    device = pick_device(cfg.device)
    data = Data(cfg, device)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.gpt_config(data.rows)).to(device).train()
    betas = cfg.beta1, cfg.beta2
    optimizer = model.configure_optimizers(cfg.weight_decay, cfg.learning_rate, betas)
    own, rule = list(model.residual.parameters()), None
    if own:  # a group of their own
        ids = set(map(id, own))
        for group in optimizer.param_groups:
            group['params'] = [p for p in group['params'] if id(p) not in ids]
        rule = {'params': own, 'weight_decay': 0.0, 'eps': recipe.rule_eps}
        optimizer.add_param_group(rule)

    watch, change, gradients = Watch(model, data), None, math.nan
    for step in range(cfg.max_iters + 1):
        if step % cfg.eval_interval == 0 or step in ALSO_MEASURED_AT:
            watch.record(step, change, gradients)
        if step == cfg.max_iters:
            return watch.records
        for group in optimizer.param_groups:
            group['lr'] = learning_rate(cfg, step)
        if rule:
            rule['lr'] *= recipe.rule_rate if step >= recipe.rule_from else 0.0
        model(*data.train_batch(step, 0))[1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        first, last = model.transformer.h[0].attn, model.transformer.h[-1].mlp
        gradients = gradient_norm(first) / gradient_norm(last)
        before = w_of(model.residual)
        optimizer.step()
        if rule:
            change = w_of(model.residual) - before
        optimizer.zero_grad(set_to_none=True)


def main():
    runs, base = {}, settings(RunsConfig, SETTINGS, 'loss', __doc__)
    for seed in SEEDS:
        for label, recipe in RECIPES.items():
            defined = repr((recipe, seed, SETTINGS))
            name = hashlib.sha256(defined.encode()).hexdigest()[:12]
            path = ROOT / 'out' / 'start' / f'{name}.json'
            if not path.exists():
                keys = {key: getattr(recipe, key) for key in ('residual', 'warmup_iters', 'beta2')}
                records = first_steps(base.plain(seed=seed, **keys), recipe)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, records)
                print(f'{label}, seed {seed}: {records["validation loss"][-1]:.4f}', flush=True)
            runs.setdefault(label, []).append(json.loads(path.read_text(encoding='utf-8')))
    data = {'command': 'python -m experiments.start',
            **environment(pick_device(base.device)), 'config': base.plain().__dict__,
            'seeds': SEEDS, 'runs': runs}
    write_json(ROOT / 'assets' / 'start.json', data)


if __name__ == '__main__':
    main()
