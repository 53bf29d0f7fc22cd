"""gunicorn's settings for plain `gunicorn` or `gunicorn wsgi:app` in this folder: those that come with the package.

qmflask/gunicorn_conf.py says why each is as it is. What you set below wins over it, and flags win over both.
"""

from qmflask.gunicorn_conf import *  # noqa: F403
