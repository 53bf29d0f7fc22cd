"""The WSGI entry point: `gunicorn wsgi:app`; some servers look for `application`."""

from qmflask.app import app

application = app

__all__ = ["app", "application"]
