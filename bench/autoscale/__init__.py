"""A simulated day of a shared reward, for bench/autoscale_day.py."""
