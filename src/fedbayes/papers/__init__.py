"""The papers' tables and figures, run again: cells, pages, figures."""
