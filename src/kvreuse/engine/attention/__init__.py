"""Attention over spans: a shared run once for all who share it, a private tail per sequence, merged by log-sum-exp."""
