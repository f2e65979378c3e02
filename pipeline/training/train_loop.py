"""THE loop: read, forward, loss, backward, step, `after_step`; one optimizer step per turn.

Batches and randomness are functions of the step, so resuming at step k equals never having stopped. Knows only the
engine's protocol and writes nothing itself.
"""

from shardvit.model.vit import set_patch_dropout
from shardvit.pipeline.checkpoint.train_state import TrainState, seed_step
from shardvit.pipeline.stage.dropout_masks import draw_masks
from shardvit.pipeline.training.after_step import AfterStep, TrainJob


def train(job: TrainJob, state: TrainState) -> TrainState:
    """Train from `state` to the end of the plan; collective. Raises as `AfterStep`."""
    plan, task, engine, rank = job.plan, job.task, job.engine, job.ranks.place.rank
    after_step = AfterStep(job, state)
    losses, passed_over = after_step.losses, frozenset(state.passed_over)
    if job.evaluates_first:
        after_step.evaluate()
    engine.module.train()

    first = state.step
    while state.step < plan.total_steps:
        step, lr = state.step, plan.schedule(state.step)
        task.step = step
        seed_step(plan.seed, step=step, rank=rank)
        if plan.patch_dropout and step in (first, plan.patch_dropout_steps):
            set_patch_dropout(engine.module, plan.patch_dropout if step < plan.patch_dropout_steps else 0.0)

        if size := plan.new_image_size(step):
            job.report.note(f"step {step:,}: images are of {size} px from here on", kind="image_size", step=step)

        if step in passed_over:  # after a rollback; `batches` omits it
            losses.pass_over(device=engine.device)
            numbers = engine.pass_over(flags=job.flags)
        else:
            for micro_step in range(plan.accumulation_steps):
                with job.phase("reading", step):
                    batch = next(job.batches)
                job.faults.note(batch, use="train", rows=plan.micro_batch_size)
                example = task.example(batch, use="train")
                draw_masks(engine, plan=plan, step=step, place=plan.first_place(rank=rank, micro_step=micro_step))
                with job.phase("forward", step):
                    outputs = engine.forward(*example.inputs)
                loss = task.loss(outputs, example.targets)
                with job.phase("backward", step):
                    engine.backward(loss)
                losses.add(loss, task.train_score(outputs, example.targets))
            with job.phase("step", step):
                numbers = engine.step(lr=lr, flags=job.flags, measure=plan.logs_after(step + 1))
            losses.end_step()
            job.report.step(plan.global_batch_images)
        after_step(numbers, lr=lr)
    return state
