""" One display for all training runs of an experiment. """
import re
import sys
import time

from tqdm import tqdm

PAUSE = 30  # seconds between two lines where there is no terminal
# Lines of a run that the display leaves out: it shows the same for all runs together.
ROUTINE = re.compile(r'step +\d+: |[\d,]+ steps of |.* M parameters$')


def duration(seconds):
    """ Seconds as a reader says them: '40 seconds', '12 minutes', '3.5 hours'. """
    if seconds < 90:
        return f'{seconds:.0f} seconds'
    return f'{seconds / 60:.0f} minutes' if seconds < 5400 else f'{seconds / 3600:.1f} hours'


class Progress:
    """ Shows how far all runs are together: steps, time left, the losses of those under way.

    In a terminal that is a bar, in a log a line every half minute. runs: {name: (steps to take,
    seconds that they are expected to take)}; workers: the number of runs at the same time.
    """
    def __init__(self, runs, workers):
        self.runs, self.workers = runs, workers
        self.steps = sum(steps for steps, _ in runs.values())
        self.expected = sum(seconds for _, seconds in runs.values())
        self.taken = dict.fromkeys(runs, 0)
        self.losses, self.finished, self.shown = {}, 0, set()
        self.began = self.last_line = time.monotonic()
        self.bar = tqdm(total=self.steps, disable=None, leave=False, dynamic_ncols=True,
                        file=sys.stderr, bar_format='{percentage:3.0f}%|{bar:20}| {desc}')
        at_once = f', {workers} at a time' if workers > 1 else ''
        word = 'run' if len(runs) == 1 else 'runs'
        self.say(f'{len(runs)} {word}{at_once}, {self.steps:,} steps in all: '
                 f'about {duration(self.expected / workers)}')

    def say(self, line):
        """ Prints a line, above the bar if there is one. """
        tqdm.write(line)
        sys.stdout.flush()

    def update(self, name, record):
        """ Takes in what train reports of the run called name. """
        steps, _ = self.runs[name]
        before = self.taken[name]
        self.taken[name] = steps - (record['max_iters'] - record['step'])
        message = record['message']
        if message and message not in self.shown and not ROUTINE.match(message):
            self.shown.add(message)  # what is true of every run is said once
            self.say(message)
        if record['loss'] is not None:
            self.losses[name] = record['loss']
        self.show(self.taken[name] - before)

    def finish(self, name, line):
        """ Notes that a run is done, and prints how it ended. """
        rest = self.runs[name][0] - self.taken[name]
        self.taken[name] += rest
        self.losses.pop(name, None)
        self.finished += 1
        going_on = self.finished < len(self.runs)
        left = f', about {duration(self.seconds_left())} left' if going_on else ''
        self.say(f'{name}: {line} ({self.finished} of {len(self.runs)} runs done{left})')
        self.show(rest)

    def seconds_left(self):
        """ The time left at the speed so far; in the first moments, by the estimate. """
        done = sum(seconds * self.taken[name] / max(1, steps)
                   for name, (steps, seconds) in self.runs.items())
        speed = self.workers
        if done > 0.02 * self.expected:
            speed = done / (time.monotonic() - self.began)  # expected seconds done in a second
        return (self.expected - done) / speed

    def show(self, steps):
        """ Moves the bar on by steps; without one, prints a line if the last is old enough. """
        state = (f'{sum(self.taken.values()):,} of {self.steps:,} steps, '
                 f'about {duration(self.seconds_left())} left')
        if self.losses:
            losses = [f'{name} {loss:.3f}' for name, loss in self.losses.items()]
            state += '; loss: ' + ', '.join(losses)
        if not self.bar.disable:
            self.bar.set_description_str(state, refresh=False)
            self.bar.update(steps)
        elif time.monotonic() - self.last_line >= PAUSE:
            self.last_line = time.monotonic()
            self.say(state)

    def close(self):
        self.bar.close()
