"""For Phusion Passenger, which loads passenger_wsgi.py from the application's folder: copy it there.

Passenger gives one request at a time to a process (threads are in its Enterprise edition), so each stream and each
request that waits for a model takes a whole process: raise passenger_max_pool_size accordingly, and set
passenger_min_instances 2, so that there is always a process that schedules. docs/deployment.md says what else
is missing.
"""

import os

os.environ.setdefault("QMFLASK_CONFIG", "/etc/qmflask/config.yaml")
os.environ.setdefault("QMFLASK_STATE", "/var/lib/qmflask")  # all processes must share it, and none else

from qmflask.app import app as application

__all__ = ["application"]
