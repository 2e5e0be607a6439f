# SPDX-License-Identifier: Apache-2.0
"""Measuring a served pair: prompts, load, figures, table and picture."""
