"""The supervisor: when ranks are restarted after a failure, and which location of a stuck rank is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.run.failure import RankFailure
from weft.run.hang_watch import location
from weft.run.supervisor import RestartPolicy, SupervisedEnd

KILLED = RankFailure(1, "error", 0.0, "step 5, backward of layer1: process was killed by SIGKILL")
END = SupervisedEnd(failure=KILLED, step=5)


def test_ranks_are_started_again_as_often_as_allowed():
    policy = RestartPolicy(2)
    for step in (5, 6):
        end = replace(END, step=step)
        assert policy.allows(end)
        policy = policy.after(end)
    assert not policy.allows(replace(END, step=7))
    assert not RestartPolicy(0).allows(END)


@pytest.mark.parametrize("kind", ["user", "all ranks"])
def test_an_error_that_every_start_repeats_is_not_tried_again(kind):
    assert not RestartPolicy(3).allows(replace(END, failure=replace(KILLED, kind=kind)))


def test_a_damaged_training_state_is_tried_again():
    end = replace(END, failure=replace(KILLED, kind="corruption"))
    assert RestartPolicy(3).allows(end)


def test_a_lost_connection_alone_is_tried_again():
    assert RestartPolicy(3).allows(replace(END, failure=replace(KILLED, kind="secondary")))


def test_a_run_that_ended_well_or_was_asked_to_end_is_not_started_again():
    assert not RestartPolicy(3).allows(SupervisedEnd(75))
    assert not RestartPolicy(3).allows(replace(END, is_requested=True))


def test_the_same_failure_at_the_same_step_is_tried_once():
    hung = replace(KILLED, text="step 5, data: no progress for 2.1 s")
    policy = RestartPolicy(3).after(replace(END, failure=hung))
    again = replace(hung, text="step 5, data: no progress for 2.4 s", at_s=9.0)
    assert not policy.allows(replace(END, failure=again))
    assert policy.allows(replace(END, failure=again, step=6)), "there was progress"
    assert policy.allows(replace(END, failure=replace(again, rank=2))), "another rank"
    assert policy.allows(END), "another failure"


def test_a_pause_at_the_same_place_is_tried_again_with_twice_the_time():
    def pause(seconds: float, *, step: int = 5) -> SupervisedEnd:
        text = f"step {step}, forward of layer1: no progress for {seconds} s"
        return SupervisedEnd(failure=replace(KILLED, text=text), step=step, is_pause=True)

    policy = RestartPolicy(4)
    for seconds, patience in ((60.1, 2), (120.2, 4), (240.1, 8)):
        assert policy.allows(pause(seconds))
        policy = policy.after(pause(seconds))
        assert policy.patience == patience
    assert policy.after(pause(480.1, step=9)).patience == 2, "another place"
    assert policy.after(END).patience == 1, "another failure"
    assert not policy.after(END).allows(pause(60.1)), "four restarts are all"


def test_a_full_disk_whose_free_space_changes_is_the_same_failure():
    full = replace(KILLED, text="not saved: the disk is full (got 86,016 bytes free; need 0.2 MiB)")
    policy = RestartPolicy(3).after(replace(END, failure=full))
    again = replace(full, text="not saved: the disk is full (got 49,152 bytes free; need 0.3 MiB)")
    assert not policy.allows(replace(END, failure=again))


STACK = """Thread 0x1 (most recent call first):
  File "/lib/threading.py", line 1 in wait
  File "/src/weft/train/data_loader.py", line 2 in _put

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward
  File "/src/weft/parallel/pipeline/player.py", line 236 in _backward
  File "/src/weft/train/step.py", line 212 in __call__
"""


def test_the_location_of_a_stack_is_the_innermost_line_of_weft_on_the_main_thread():
    assert location(STACK) == " [player.py:236 in _backward]"
    assert location('Thread 0x1:\n  File "/lib/x.py", line 3 in f\n') == " [x.py:3 in f]"
    assert location("") == ""
