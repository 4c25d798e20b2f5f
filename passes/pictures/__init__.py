"""`Problem` and `Plan` -> the figures that a page shows (`compile_remat.pages.figures`).  Free of torch; draws nothing."""
