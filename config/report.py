""" What a run tells: lines and a bar in the terminal or to its caller, records in files. """
import json
import math
import os
import sys
from contextlib import suppress

from tqdm import tqdm


class Display:
    """ Shows lines and steps in the terminal or, if there is a function report, hands them to it.

    report gets a dict of step, max_iters, loss, val_loss and message. label: what lines begin with.
    """
    def __init__(self, max_iters, quiet=False, label='', report=None):
        self.max_iters, self.quiet, self.label, self.report = max_iters, quiet, label, report
        self.step, self.val_loss = 0, None  # the last ones known
        self.progress_bar = None

    def say(self, line):
        if self.report:
            self.tell(message=line)
        elif not self.quiet:
            with suppress(OSError):  # whoever reads this may have gone away; the run goes on
                tqdm.write(self.label + line)

    def tell(self, loss=None, message=None):
        self.report({'step': self.step, 'max_iters': self.max_iters, 'loss': loss,
                     'val_loss': self.val_loss, 'message': message})

    def bar(self, step):
        """ The progress bar, for a with statement; it shows nothing where there is no terminal. """
        self.step = step
        hidden = self.quiet or self.label or self.report or sys.stderr is None
        self.progress_bar = tqdm(total=self.max_iters, initial=step, unit='step', leave=False,
                                 disable=True if hidden else None)
        return self.progress_bar

    def show_step(self, step, loss, speed):
        """ Moves the bar on. speed: tokens a second. """
        self.step = step
        self.progress_bar.set_postfix_str(f'loss {loss:.3f}, {speed:,.0f} tokens/s', refresh=False)
        self.progress_bar.update()
        if self.report:
            self.tell(loss)


def json_line(record):
    """ record as JSON, which has no NaN: a number that is not finite becomes null. """
    nulls = {key: None for key, value in record.items()
             if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | nulls, allow_nan=False)


def import_wandb(project):
    """ The package wandb; ValueError if it is not installed. """
    try:
        import wandb
    except ImportError as e:
        raise ValueError(f'wandb={project!r}: needs the package wandb; pip install wandb') from e
    return wandb


def start_wandb(project, folder, settings):
    """ A run of Weights & Biases that keeps its files in folder and is called as it is. """
    wandb = import_wandb(project)
    name = os.path.basename(os.path.abspath(folder))
    try:
        return wandb.init(project=project, name=name, dir=folder, config=settings)
    except wandb.Error as e:
        raise ValueError(f'wandb={project!r}: {e}; log in with wandb login, or set '
                         'WANDB_MODE=offline') from e
