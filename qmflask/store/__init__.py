"""The store: one SQLite database that holds all shared state; every line of SQL is in this package."""

from qmflask.store.database import Deposed as Deposed
from qmflask.store.database import Store as Store
from qmflask.store.database import StoreError as StoreError
from qmflask.store.database import StoreTooNew as StoreTooNew
from qmflask.store.database import Transaction as Transaction
from qmflask.store.database import prepare_state_directory as prepare_state_directory
