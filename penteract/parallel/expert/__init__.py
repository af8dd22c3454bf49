"""Mixture of experts over ranks: how tokens reach their experts, and the experts themselves."""
