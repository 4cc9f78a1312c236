"""The progress bar of a run: work is counted in passes over the training set, those of the monitor included."""

from moatlab.runtime.console import Bar
from moatlab.training.checkpoint import Progress
from moatlab.training.monitor import PASSES
from moatlab.training.setup import Session


class RunBar(Bar):
    def __init__(self, session: Session, progress: Progress) -> None:
        recipe = session.recipe
        self.session, self.progress = session, progress
        self.per_image = PASSES / (session.steps_per_epoch * recipe.batch_size)  # that the monitor looks at
        watched = recipe.epochs * len(session.watched_y) + len(session.images.test_y)
        total = session.method.cost(recipe.epochs).passes + watched * self.per_image
        super().__init__(recipe.method, total, self.work())

    def work(self, images_watched: int = 0) -> float:
        """What is done of the plan: healing comes on top of it."""
        progress, session = self.progress, self.session
        passes = (progress.cost.passes - progress.healing_cost.passes) / session.steps_per_epoch
        return passes + (progress.epochs_logged * len(session.watched_y) + images_watched) * self.per_image

    def show(self, images_watched: int = 0) -> None:
        session, step = self.session, self.progress.step
        stage = session.stage_at(min(step, session.total_steps - 1), self.progress.replaced)
        epoch = min(step // session.steps_per_epoch + 1, session.recipe.epochs)
        title = f"epoch {epoch}/{session.recipe.epochs} {stage}"
        self.update(self.work(images_watched), f"step {step}/{session.total_steps}", title=title)
