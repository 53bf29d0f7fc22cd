"""Memory arithmetic: samples in, ceilings, charges and gates out; who reads the hardware is `gpu` and `host`."""
