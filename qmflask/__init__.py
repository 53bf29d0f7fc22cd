"""qmflask: one endpoint in front of many local model servers, scheduled by memory."""

__version__ = "0.1.0"
