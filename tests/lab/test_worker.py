"""The worker: jobs run in order on one thread, stop between steps, and no error is lost."""

from __future__ import annotations

import threading
import time

import pytest

from labkit.lab.worker import Job, Worker, device


@pytest.fixture
def worker():
    made = Worker()
    yield made
    made.close()


def test_jobs_run_in_order_on_one_other_thread(worker):
    seen = []
    for i in range(5):
        worker.submit(lambda job, i=i: seen.append((i, threading.current_thread().name)), f"job {i}")
    worker.join(10)
    assert [i for i, _ in seen] == [0, 1, 2, 3, 4]
    assert {name for _, name in seen} == {"labkit-worker"}


def test_submit_returns_before_the_job_has_ended(worker):
    release = threading.Event()
    job = worker.submit(lambda job: release.wait(10), "waits")
    assert not job.done and worker.busy
    with pytest.raises(TimeoutError, match="waits is still running"):
        job.wait(0.01)
    release.set()
    assert job.wait(10) is True
    worker.join(10)
    assert not worker.busy


def test_cancel_is_seen_between_steps_and_what_waits_is_dropped(worker):
    begun, steps, told = threading.Event(), [], []

    def work(job: Job) -> int:
        begun.set()
        while not job.should_stop():
            steps.append(1)
            threading.Event().wait(0.001)
        return len(steps)

    first = worker.submit(work, "steps")
    second = worker.submit(lambda job: steps.append("never"), "waits behind", on_dropped=lambda: told.append(1))
    begun.wait(10)
    second.cancel()
    first.cancel()
    assert first.wait(10) == len(steps)
    second.wait(10)
    assert "never" not in steps and told == [1]


def test_the_lock_keeps_a_learners_cell_and_a_job_apart(worker):
    order = []
    with device():
        job = worker.submit(lambda job: order.append("job"), "job")
        assert not job.done
        order.append("cell")
    job.wait(10)
    assert order == ["cell", "job"]


def fails(job: Job) -> None:
    raise ValueError("broken")


def test_an_error_is_handed_to_its_card_and_the_thread_goes_on(worker, monkeypatch):
    monkeypatch.delenv("LABKIT_STRICT", raising=False)
    cards: list[BaseException] = []
    job = worker.submit(fails, "fails", cards.append)
    job.wait(10)
    assert [str(e) for e in cards] == ["broken"]
    assert worker.submit(lambda job: 7, "next").wait(10) == 7


def test_strict_raises_instead_of_a_card(worker, monkeypatch):
    monkeypatch.setenv("LABKIT_STRICT", "1")
    cards: list[BaseException] = []
    job = worker.submit(fails, "fails", cards.append)
    with pytest.raises(ValueError, match="broken"):
        job.wait(10)
    assert cards == []
    worker.submit(lambda job: None, "is not told again").wait(10)


def test_strict_raises_an_error_nobody_waited_for_at_the_next_job(worker, monkeypatch):
    monkeypatch.setenv("LABKIT_STRICT", "1")
    job = worker.submit(fails, "fails", lambda error: None)
    deadline = time.monotonic() + 10
    while not job.done and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    with pytest.raises(ValueError, match="broken"):
        worker.submit(lambda job: None, "next")
    worker.submit(lambda job: None, "and the one after runs").wait(10)


def test_an_error_without_a_card_is_raised_to_who_waits(worker, monkeypatch):
    monkeypatch.delenv("LABKIT_STRICT", raising=False)
    with pytest.raises(ValueError, match="broken"):
        worker.submit(fails, "fails").wait(10)


def test_close_ends_the_thread_and_a_later_job_starts_a_new_one():
    worker = Worker()
    begun = threading.Event()

    def work(job: Job) -> None:
        begun.set()
        job._stop.wait(10)

    worker.submit(work, "runs until stopped")
    begun.wait(10)
    worker.close()
    assert worker.submit(lambda job: 3, "again").wait(10) == 3
    worker.close()
