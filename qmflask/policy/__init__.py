"""Pure scheduling decisions: what must stop, and who is served when."""
