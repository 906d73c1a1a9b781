"""Traces of episodes by OpenTelemetry, across the programs of a job. Off: nothing is imported, and nothing recorded"""
