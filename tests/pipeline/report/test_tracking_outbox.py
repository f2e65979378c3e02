from hypothesis import given
from hypothesis import strategies as st

from pipeline.report.metrics_log import MetricRow
from pipeline.report.tracking_outbox import Outbox
from pipeline.report.tracking_state import SentMark


@given(st.lists(st.one_of(st.just("send"), st.just("begin"), st.integers(0, 2)), max_size=60), st.integers(1, 5))
def test_every_row_is_sent_once_and_in_order_however_small_the_outbox(actions: list, max_rows: int) -> None:
    """A model of the sender: `begin` looks at the head, `send` confirms it, and rows arrive in between."""
    outbox, mark = Outbox(max_rows=max_rows, gap_below_step=0), SentMark()
    file: list[MetricRow] = []
    sent: list[MetricRow] = []
    step, looked = 0, None

    def confirm() -> None:
        nonlocal looked, mark
        looked = looked or outbox.head(3)
        if looked.gap_below_step is not None:
            rows = list(mark.unsent(row for row in file if row.step < looked.gap_below_step))
            outbox.gap_filled(looked.gap_below_step)
        else:
            rows = looked.rows
            outbox.sent(looked.last_number)
        sent.extend(rows)
        mark = mark.after(rows)
        looked = None

    for action in actions:
        if action == "begin":
            looked = looked or outbox.head(3)
        elif action == "send":
            confirm()
        else:
            step += action
            row = MetricRow(step=step, images_seen=len(file), time=0.0, metrics={})
            file.append(row)
            outbox.put(row)
            assert len({row.step for row in outbox.head(1000).rows}) <= max_rows
    confirm()
    while outbox.head(1).rows or outbox.head(1).gap_below_step is not None:
        confirm()
    assert sent == file
