"""Results that the workers of a test run share: the first one that needs a result makes it."""

import os
import pickle


def once_per_run(tmp_path_factory, name, make):
    """Return ``make()``, from another worker of this run if that has made it; results are pickled."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:  # there are no workers
        return make()
    import fcntl  # not on Windows, where tests run without workers

    path = tmp_path_factory.getbasetemp().parent / f"{name}-{run}.pickle"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        return pickle.loads(path.read_bytes())
