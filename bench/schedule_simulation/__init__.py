"""Simulated jobs under each schedule, for bench/simulate_schedules.py."""
