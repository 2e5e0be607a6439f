# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: find one, read it, normalise its configuration, fuse its weights."""
