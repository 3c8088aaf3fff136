"""What a MoE layer does with the expert cache: one contract, three implementations."""
