"""By which configuration a leader decides: the one that the store names, as far as it can be read."""

from __future__ import annotations

from collections.abc import Callable

from qmflask.errors import ModelNotFound, QmflaskError, Unavailable
from qmflask.store import Store, Transaction, reading


class InForce:
    """Compares the generation that a term decides by with the store's, and takes up the newer one first.

    Workers queue rows by a configuration that the leader may not have heard of yet. `own` is the generation this
    process serves with; `refresh` takes up the newest one, False when its file cannot be read. Each generation is
    tried once from here: who keeps house tries it again each second.
    """

    def __init__(self, store: Store, own: Callable[[], int], refresh: Callable[[], bool]) -> None:
        self._store = store
        self._own = own
        self._refresh = refresh
        self._lost = 0

    @property
    def certain(self) -> bool:
        """False while we go on with an old configuration, because the one in force cannot be read."""
        return not self._lost

    def catch_up(self) -> None:
        """Take up the configuration in force, unless it is ours or could not be read."""
        with self._store.read() as tx:
            published = reading.scheduler(tx).config_generation
        if published == self._own():
            self._lost = 0
        elif published != self._lost:
            self._lost = 0 if self._refresh() else published

    def behind(self, tx: Transaction, generation: int) -> bool:
        """Whether what `tx` sees may be of a newer configuration than `generation`, one that is still to be tried.

        Then nothing may be decided by `generation`: catch up, and look again.
        """
        return reading.scheduler(tx).config_generation not in (generation, self._lost)

    def not_found(self, message: str) -> QmflaskError:
        """What to tell who asks for a model that our configuration lacks: that it is not there only if we know that."""
        if self.certain:
            return ModelNotFound(message)
        return Unavailable(
            f"the configuration in force ({self._lost}) cannot be read by the scheduler, and the one before it lacks"
            " this model; see the log, or save the configuration file again",
            retry_after=1,
        )
