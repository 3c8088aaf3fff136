"""The engine process: composition root, attach, warm-up, main loop. Import `main` only."""
