"""How many files one has to read to follow a call, or the capture of a bucket."""

import pytest
from way_of_a_call import MAX_FILES_OF_A_BUCKET, MAX_FILES_OF_A_CALL, ways


@pytest.fixture(scope="module")
def both():
    return ways()


def test_a_replayed_call_passes_through_few_files_and_never_climbs_back(both):
    call, _ = both
    assert call.files[:2] == ["piecewise/api.py", "piecewise/capture/call_router.py"]
    assert "runners/step_plan.py" in call.files
    assert len(call.files) <= MAX_FILES_OF_A_CALL, call.files
    assert not call.climbs


def test_the_capture_of_a_bucket_passes_through_few_files(both):
    _, bucket = both
    assert bucket.files[0] == "piecewise/capture/bucket_capture.py"
    assert len(bucket.files) <= MAX_FILES_OF_A_BUCKET, bucket.files
