"""What the simulator needs of greenlet, in a browser: functions that run on stacks of their own and switch by name.

A greenlet that switches to another one suspends its WebAssembly stack until a JavaScript promise is resolved (JSPI,
JavaScript Promise Integration, through Pyodide's `run_sync`). It resumes when another greenlet resolves the promise.
"""

import itertools
import sys

from pyodide.code import run_js
from pyodide.ffi import create_proxy, run_sync

_ids = itertools.count()
_starting = {}  # id -> greenlet that JavaScript is about to start


class _Sleep:
    """What a suspended greenlet awaits. To asyncio it is a future, so `run_sync` makes no task for it.

    A task takes turns in the browser's queue of events, where each costs up to a millisecond.
    """

    _asyncio_future_blocking = False

    def __init__(self):
        self.callback, self.is_over = None, False

    def __await__(self):
        return iter(())

    def add_done_callback(self, callback):
        self.callback = callback
        if self.is_over:
            callback(self)

    def result(self):
        return None

    exception = result

    def wake(self):
        self.is_over = True
        if self.callback is not None:
            self.callback(self)


class _Frame:
    """A frame of a suspended greenlet, and its caller's.

    Python's own `f_back` follows addresses on the stack, which is not in memory while the greenlet is suspended.
    """

    __slots__ = ("_frame", "f_back")

    def __init__(self, frame):
        self._frame, self.f_back = frame, None

    def __getattr__(self, name):
        return getattr(self._frame, name)


def _frames(frame):
    """Return the innermost frame of this greenlet, with the frames of its callers."""
    innermost = last = _Frame(frame)
    while (frame := frame.f_back) is not None and frame.f_code is not _enter.__code__:
        last.f_back = _Frame(frame)
        last = last.f_back
    return innermost


class error(Exception):
    """A greenlet is used in a way that is not supported."""


class GreenletExit(BaseException):
    """Ends a greenlet; its parent receives it as the result."""


class greenlet:
    """A function on a stack of its own; `switch` runs it until it switches elsewhere, or ends."""

    run = None

    def __new__(cls, *_, **__):
        made = object.__new__(cls)
        made._begun, made._received, made._sleep = False, None, None
        made.parent, made.dead, made.gr_frame, made.gr_context = _current, False, None, None
        return made

    def __init__(self, run=None, parent=None):
        if run is not None:
            self.run = run
        if parent is not None:
            self.parent = parent

    def switch(self, *args):
        """Continue here with these values; return what the calling greenlet receives when it continues."""
        return _transfer(self, (args, None))

    def throw(self, kind=GreenletExit, value=None, _=None):
        """Raise an exception here, as `switch` otherwise returns a value."""
        made = kind if isinstance(kind, BaseException) else kind() if value is None else value
        if not self._begun:
            self.dead = True
            return _transfer(self.parent, ((made,), None) if isinstance(made, GreenletExit) else ((), made))
        return _transfer(self, ((), made))

    def __bool__(self):
        return self._begun and not self.dead


def getcurrent():
    """Return the greenlet that runs."""
    return _current


def gettrace():
    """Return None: switches cannot be traced here."""
    return None


def settrace(function):
    """Raise an error, unless it turns tracing off."""
    if function is not None:
        raise error("the debugger does not work in a browser")


def _transfer(target, message):
    global _current
    while target.dead:
        target = target.parent
    me = _current
    if target is not me:
        me.gr_frame = _frames(sys._getframe(2)) if me is not _root else None
        target.gr_frame, target._received, _current = None, message, target
        me._sleep = sleep = _Sleep()
        _continue(target)
        run_sync(sleep)
        message, me._received = me._received, None
    return _unpack(*message)


def _continue(target):
    if target._begun:
        target._sleep.wake()
    else:
        target._begun, number = True, next(_ids)
        _starting[number] = target
        _start(number)


def _unpack(values, raised):
    if raised is not None:
        raise raised
    return values[0] if len(values) == 1 else values or None


def _enter(number):
    """Run a greenlet that JavaScript has started on a new stack, and then continue its parent."""
    global _current
    me = _starting.pop(number)
    (values, raised), me._received = me._received, None
    try:
        if raised is not None:
            raise raised
        context = me.gr_context
        result = (me.run(*values) if context is None else context.copy().run(me.run, *values),), None
    except GreenletExit as exit:
        result = (exit,), None
    except BaseException as problem:
        result = (), problem
    me.dead = True
    target = me.parent
    while target.dead:
        target = target.parent
    target.gr_frame, target._received, _current = None, result, target
    target._sleep.wake()


# On the next turn of JavaScript, when this stack is suspended: a stack that begins on top of another cannot outlive it.
_start = run_js("(enter) => (number) => { Promise.resolve().then(() => enter.callPromising(number)); }")(
    create_proxy(_enter)
)
_current = None
_current = _root = greenlet()  # the stack that everything else runs on
_root._begun = True
