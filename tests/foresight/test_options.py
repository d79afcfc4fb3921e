"""Serving options of JetSpec++."""

import pytest

from sglang_jetspec.foresight.options import ForesightOptions, foresight_options
from sglang_jetspec.foresight.refine import RefinePlan


def test_off_unless_something_is_refined_or_foreseen():
    assert foresight_options({}) is None
    assert foresight_options({"rule": "geometric", "passes": None}) is None
    found = foresight_options({"passes": 3, "refreshes": 2})
    assert found == ForesightOptions(3, 2, 0, None, 64)
    assert found.plan == RefinePlan(3, 2)
    assert found.reads_predictions
    assert not foresight_options({"passes": 1}).reads_predictions
    assert foresight_options({"outcomes": 1}).reads_predictions


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"passes": 1, "refreshes": 2}, "refreshes=2, passes=1.*0 <= refreshes <= passes"),
        ({"refreshes": 1}, "refreshes=1, passes=0"),
        ({"passes": -1}, "passes=-1"),
        ({"outcomes": 65}, "outcomes=65: use 0 to 64"),
        ({"outcomes": -1}, "outcomes=-1"),
        ({"outcomes": 1, "rule": "best"}, "rule='best': use one of calibrated"),
        ({"outcomes": 1, "max_foresight_blocks": 0}, "max_foresight_blocks=0"),
        ({"outcomes": 1, "executor": "process"}, "executor='process': use one of serial, thread"),
        ({"outcomes": 1, "foresight_cores": "one"}, "foresight_cores='one': use some of this"),
        ({"outcomes": 1, "foresight_cores": "99999"}, "foresight_cores='99999'"),
        ({"outcomes": 1, "foresight_cores": ""}, "foresight_cores=''"),
    ],
)
def test_what_cannot_be_is_named(given, named):
    with pytest.raises(ValueError, match=named):
        foresight_options(given)
