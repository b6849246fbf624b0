"""The numbers by which the compiled attention and its callers understand each other. Imports nothing."""

TILE = 128  # keys a tile, as nanokv.kv.tile
FEW = 8  # rows of a run up to which its tiles are shared out

# Columns of a run of rows that fold the same tiles: its rows, its tiles in the list, its window (0: none) and sinks.
BEGIN, END, FIRST, LAST, WINDOW, SINKS, RUN_COLUMNS = range(7)
# Columns of a tile: its number, its codec, the addresses of three planes of keys and three of values, which query it meets
# (0 or 1), and the positions low .. high - 1 to which it is limited.
NUMBER, CODEC, KEYS, VALUES, QUERY, LOW, HIGH, TILE_COLUMNS = 0, 1, 2, 5, 8, 9, 10, 11
NO_LIMIT = 1 << 62
FLOAT32, FLOAT16, BFLOAT16, INT8, FP8, FP8_FIXED, INT4 = range(7)

# Numbers of a program's line (program.py): its kernel's address and its rows, then the kernel's own; the bits of a float32.
KERNEL, ROWS, FIRST_OWN, REAL, COLUMNS = 0, 1, 2, 12, 13
LINEAR_OUT = 9
# Columns of a set of runs, one for layers that see alike: its first run of few rows, of many, the end; its first tile that is
# shared out, the end of those.
FEW_RUNS, MANY_RUNS, SET_END, FEW_TILES, TILES_END, SET_COLUMNS = range(6)
# A step's two counters, tasks begun and done, lie in lines of the cache of their own.
DONE, COUNTER_BYTES = 8, 128
# A run's arguments: addresses, sizes, and the bits of fp8's scale.
(
    STEPS, PROGRAM, COUNTERS, SCRATCH_BYTES, NUM_ROWS, POSITIONS, HOMES, NUM_SETS, SETS, NUM_RUNS, RUNS, PLACES,
    NUM_LISTED, LISTED, OWNER, NUM_TILES, TILES, WHICH, UNITS, UNIT_SIZE, NUM_SOURCES, SOURCES, FIXED, LINES, PART_M, PART_L,
    PART_O, THREADS, BLOCK,
) = range(29)  # fmt: skip
