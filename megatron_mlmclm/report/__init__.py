"""What a run did, to look at: curves (PNG, SVG) and one self-contained HTML page.

Import `draw_curves` from `.curves`, `write_report` from `.html`, `read_metrics` from `.metrics`; matplotlib is loaded
only by those that draw.
"""
