"""What the head serves of the samples that were scored last, before the trajectory log has their step."""

from rljob_api.run.base import Count, Record
from rljob_api.run.trajectories import SampleRow


class RecentSamples(Record):
    """The last samples after a cursor. They have numbers: the last one has `next - 1`, the one before it `next - 2`."""

    feed: str
    """Id of the numbers: those of a head that was restarted start again."""
    next: Count
    """The cursor of the next request."""
    samples: list[SampleRow] = []
    """In the order in which they were scored. Long texts lack their middle; a conversation has its last answer."""
