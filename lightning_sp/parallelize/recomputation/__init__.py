"""What the recomputation of a block in the backward needs beside what torch's checkpoint restores: the default dtype, and what it keeps."""
