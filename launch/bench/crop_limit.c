/* The least that any decoder built on libjpeg-turbo does for a box of a JPEG: entropy-decode the rows down to the box's
   end, transform and colour-convert the box (widened to whole blocks). Made and called by crop_limit.py. */
#include <stddef.h>
#include <stdio.h>
#include <setjmp.h>
#include <jpeglib.h>

static jmp_buf failed;
static void leave(j_common_ptr info) { (void)info; longjmp(failed, 1); }
static void be_silent(j_common_ptr info, int level) { (void)info; (void)level; }

static struct jpeg_decompress_struct decoder;
static struct jpeg_error_mgr errors;

/* `out` has room for height rows of row_bytes. Returns the width that was decoded, or 0 if it failed. */
int decode_box(const unsigned char *data, size_t bytes, unsigned left, unsigned top, unsigned width, unsigned height,
               unsigned char *out, size_t row_bytes)
{
    static int ready = 0;
    if (!ready) {
        decoder.err = jpeg_std_error(&errors);
        errors.error_exit = leave;
        errors.emit_message = be_silent;
        if (setjmp(failed)) return 0;
        jpeg_create_decompress(&decoder);
        ready = 1;
    }
    if (setjmp(failed)) {
        jpeg_abort_decompress(&decoder);
        return 0;
    }
    jpeg_mem_src(&decoder, (unsigned char *)data, bytes);
    jpeg_read_header(&decoder, TRUE);
    decoder.out_color_space = JCS_RGB;
    jpeg_start_decompress(&decoder);
    JDIMENSION first = left, wide = width;
    jpeg_crop_scanline(&decoder, &first, &wide);
    if ((size_t)wide * 3 > row_bytes) leave((j_common_ptr)&decoder);
    if (top) jpeg_skip_scanlines(&decoder, top);
    for (unsigned row = 0; row < height;) {
        JSAMPROW at = out + row * row_bytes;
        row += jpeg_read_scanlines(&decoder, &at, 1);
    }
    jpeg_abort_decompress(&decoder);
    return (int)wide;
}
