"""A page that shows runs and ablations while they train: ``minillama watch runs``.

    run folders ──live.py, what is new in them──▶ server.py, 127.0.0.1 only ──▶ page.html, watch.js

It reads the folders and writes nothing, so it may be started, stopped and restarted at any time.
Needs the ``report`` extra, whose figures it draws.
"""
