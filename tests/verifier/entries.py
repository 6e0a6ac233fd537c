"""Entries for a leaderboard: an honest one, and those that leave out, remember or put off a part of the step."""

import os
import threading
import time

import torch

from impl.mesh import MeshTrainer, torch_parallel

TIMED_CONTEXT = 64


def _sharded(model, mesh):
    return model if mesh.size() == 1 else torch_parallel(model, mesh)


class Honest(MeshTrainer):
    """The suite's own step, around FSDP2 where there are several ranks."""

    def __init__(self, model_fn, optimizer_fn, mesh, *, max_norm=1.0):
        super().__init__(_sharded, model_fn, optimizer_fn, mesh, max_norm=max_norm)
        self.steps = 0

    def step(self, batches):
        self.steps += 1
        return super().step(batches)

    def without_a_layer(self, batches):
        """The step, but for the last layer."""
        kept = self.model.layers
        self.model.layers = kept[:1]
        try:
            return super().step(batches)
        finally:
            self.model.layers = kept


class Compiled(Honest):
    """Its feed-forward networks are compiled: modules of Python that go with the caches."""

    def __init__(self, model_fn, optimizer_fn, mesh, *, max_norm=1.0):
        super().__init__(model_fn, optimizer_fn, mesh, max_norm=max_norm)
        for layer in self.model.layers:
            layer.feed_forward.compile()


class LosesSomeGradients(Honest):
    """One element of four hundred of the embedding's gradient is no number."""

    def full_gradients(self):
        found = super().full_gradients()
        found["tok_embeddings.weight"].view(-1)[::400] = float("nan")
        return found


class SkipsALayerAtTheTimedSize(Honest):
    def step(self, batches):
        at_size = batches[0][0].shape[1] >= TIMED_CONTEXT
        return self.without_a_layer(batches) if at_size else super().step(batches)


class SkipsALayerAfterTheFirstSteps(Honest):
    def step(self, batches):
        return self.without_a_layer(batches) if self.steps > 5 else super().step(batches)


class SkipsOneUpdate(Honest):
    """Computes everything, and once keeps the parameters and the optimizer's moments."""

    def step(self, batches):
        update = self.optimizer.step
        if self.steps == 5:
            self.optimizer.step = lambda: None
        try:
            return super().step(batches)
        finally:
            self.optimizer.step = update


class SkipsRows(Honest):
    """Trains on the first row of each rank, which is faster, and as good on average."""

    def step(self, batches):
        return super().step([tuple(each[:1] for each in batch) for batch in batches])


class RemembersBatches(Honest):
    """Trains on no batch twice."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.known = {}

    def key(self, batches):
        return bytes(batches[0][0].numpy())

    def step(self, batches):
        key = self.key(batches)
        if key not in self.known:
            self.known[key] = super().step(batches)
        return self.known[key]


class RemembersShapes(RemembersBatches):
    """Replays what it once did for the shape, as a graph with its inputs in it would."""

    def key(self, batches):
        return batches[0][0].shape


class ComputesBefore(Honest):
    """Has a result before it is asked: that of tokens that it drew itself."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        tokens = torch.randint(768, (4, TIMED_CONTEXT))
        self.before = super().step([(tokens, torch.arange(TIMED_CONTEXT).expand(4, -1), tokens)])

    def step(self, batches):
        return self.before


class LeavesItToAThread(Honest):
    """Returns the loss and the norm; a thread waits, and updates."""

    thread = None

    def step(self, batches):
        if self.thread is not None:
            self.thread.join()
        update, self.optimizer.step = self.optimizer.step, lambda: None
        found = super().step(batches)
        self.optimizer.step = update

        def later():
            time.sleep(0.4)
            update()

        self.thread = threading.Thread(target=later)
        self.thread.start()
        return found

    def full_parameters(self):
        if self.thread is not None:
            self.thread.join()
        return super().full_parameters()


class LeavesItToTheNextCall(Honest):
    """The update of a step is made when the next one begins."""

    pending = False

    def finish(self):
        if self.pending:
            self.optimizer.step()
            self.pending = False

    def step(self, batches):
        self.finish()
        update, self.optimizer.step = self.optimizer.step, lambda: None
        found = super().step(batches)
        self.optimizer.step, self.pending = update, True
        return found


class LeavesItToTheReading(LeavesItToTheNextCall):
    """And when somebody looks."""

    def full_parameters(self):
        if self.pending:
            time.sleep(0.5)
        self.finish()
        return super().full_parameters()


class LeavesItsBackwardToTheNextCall(Honest):
    """Returns the loss, and a norm that it had before."""

    last, norm = None, torch.ones(())

    def step(self, batches):
        if self.last is not None:
            _, self.norm = super().step(self.last)
        self.last = batches
        with torch.no_grad():
            return self._over_data(self.objective.losses(self.model, batches[0])) / 256, self.norm


class StopsTheClocks(Honest):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.perf_counter = time.time = lambda: 0.0
        torch.cuda.Event = torch.cuda.synchronize = None


class StopsTheJudge(Honest):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        from perf import timed_entry

        timed_entry.Rank.step = lambda self, batches: (6.7, 0.5, None)


class HalvesTheLearningRate(Honest):
    """The direction of every step is right."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class HalvesItsGradients(Honest):
    """Adam's steps hide the factor; `full_gradients` does not."""

    def _norm(self, gradients):
        norm = super()._norm(gradients)
        torch._foreach_mul_(gradients, 0.5)
        return norm


class Exits(Honest):
    def step(self, batches):
        os._exit(0)


class Raises(Honest):
    def step(self, batches):
        raise ValueError("no step today")
