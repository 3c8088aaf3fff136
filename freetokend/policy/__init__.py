"""Pure decisions over values: no clocks, no logs, no input or output."""
