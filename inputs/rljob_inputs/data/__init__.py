"""Datasets: rows from files and the Hub, prompts from rows, and the lengths of prompts."""
