"""The terminal, lent to a script so that prompts, debuggers, Ctrl-C and Ctrl-Z work in it."""

import os
import signal
import stat

STDIN, STDOUT = 0, 1


class Terminal:
    """The terminal on standard input, of which this process's group is the foreground."""

    def __init__(self) -> None:
        self._own = os.getpgrp()
        self._script = 0
        self._is_lent = False

    @classmethod
    def to_lend(cls) -> "Terminal | None":
        """The terminal, if it is ours to lend: in `odf run x.sh | less` it is less's too."""
        try:
            piped = stat.S_ISFIFO(os.fstat(STDOUT).st_mode)
        except OSError:  # closed
            piped = False
        return cls() if _foreground() == os.getpgrp() and not piped else None

    def lend(self, script: int) -> None:
        """Make `script` the foreground; if it read too early, `script_stopped` wakes it."""
        self._script = script
        self._is_lent = True
        _set_foreground(script)

    def take_back(self) -> None:
        """Be the foreground again, unless the shell has sent us to the background meanwhile."""
        if self._is_lent:
            self._is_lent = False
            _set_foreground(self._own)

    def pass_on_interrupt(self) -> None:
        """Interrupt our group, as Ctrl-C would have: `make` or a loop in a shell ends as well."""
        os.kill(0, signal.SIGINT)

    def script_stopped(self, number: int) -> None:
        """Stop as a shell's job does when `number` has stopped the script, until `fg` or `bg`.

        After `bg` and `fg` the script may want the terminal that the shell gave to us: lend it.
        """
        wants_terminal = number in (signal.SIGTTIN, signal.SIGTTOU)
        if not (wants_terminal and _foreground() in (self._own, self._script)):
            self.take_back()
            os.kill(0, signal.SIGTSTP)
        if _foreground() == self._own:
            self.lend(self._script)
        try:
            os.killpg(self._script, signal.SIGCONT)
        except OSError:  # it has ended
            return


def _foreground() -> int:
    try:
        return os.tcgetpgrp(STDIN)
    except OSError:  # not the terminal of our session, or it is gone
        return -1


def _set_foreground(group: int) -> None:
    # From the background, SIGTTOU would stop us. The mask is per thread: no handler is needed.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
    try:
        os.tcsetpgrp(STDIN, group)
    except OSError:  # the script has ended already, or the terminal is gone
        pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
