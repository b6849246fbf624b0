// Reads a case of `python cli.py vectors -o DIR --layout contiguous --dtype float32`, computes attention, compares it with the
// expected output and the bound of the same file, and can write its own results file for `python cli.py verify`.
//
//     cc -O2 -o read_vectors read_vectors.c -lm
//     for f in DIR/*.safetensors; do ./read_vectors $f OUT/$(basename $f); done
//     python cli.py verify DIR OUT/*.safetensors
//
// A safetensors file is 8 bytes of header length, little-endian, that much JSON, then the data. Each tensor of the JSON is
// "name":{"dtype":..,"shape":[..],"data_offsets":[begin,end]}; "__metadata__" holds the case's name and scale, as strings. No
// library is needed.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *data;
    long shape[4];
    int dims;
} Tensor;

static char *header, *body;

static void die(const char *what, const char *which) {
    fprintf(stderr, "error: %s: %s\n", what, which);
    exit(2);
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) die("cannot open", path);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    unsigned char *all = malloc((size_t)size + 1);
    if (!all || fread(all, 1, (size_t)size, file) != (size_t)size || size < 8) die("cannot read", path);
    fclose(file);
    uint64_t length = 0;
    for (int i = 7; i >= 0; i--) length = length << 8 | all[i];
    if (length > (uint64_t)size - 8) die("the header is longer than the file", path);
    header = malloc(length + 1);
    memcpy(header, all + 8, length);
    header[length] = 0;
    body = (char *)all + 8 + length;
}

static Tensor tensor(const char *name, const char *dtype) {
    Tensor found = {0};
    char key[64];
    snprintf(key, sizeof key, "\"%s\":{", name);
    char *at = strstr(header, key);
    if (!at) die("no tensor", name);
    char *end = strchr(at, '}'), kind[16] = "";
    char *tag = strstr(at, "\"dtype\":\""), *shape = strstr(at, "\"shape\":["), *place = strstr(at, "\"data_offsets\":[");
    if (!end || !tag || !shape || !place || place > end) die("a header that this reader cannot follow", name);
    sscanf(tag, "\"dtype\":\"%15[^\"]", kind);
    if (strcmp(kind, dtype)) die("not of the expected dtype", name);
    for (char *p = shape + strlen("\"shape\":["); *p != ']' && found.dims < 4; p += *p == ',') found.shape[found.dims++] = strtol(p, &p, 10);
    found.data = body + strtol(place + strlen("\"data_offsets\":["), NULL, 10);
    return found;
}

static const char *setting(const char *name) {
    static char value[64];
    char key[64];
    snprintf(key, sizeof key, "\"%s\":\"", name);
    char *at = strstr(header, key);
    if (!at) die("no setting", name);
    sscanf(at + strlen(key), "%63[^\"]", value);
    return value;
}

static void attend(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lens, float scale, float *out) {
    long sequences = lens.shape[0], heads = q.shape[1], dim = q.shape[2], capacity = k.shape[1], kv_heads = k.shape[2];
    const int32_t *start = starts.data, *len = lens.data;
    float *p = malloc(sizeof(float) * (size_t)(capacity + 1));
    for (long b = 0; b < sequences; b++)
        for (long row = start[b]; row < start[b + 1]; row++)
            for (long h = 0; h < heads; h++) {
                const float *query = (const float *)q.data + (row * heads + h) * dim;
                long head = h / (heads / kv_heads), seen = len[b] - start[b + 1] + row + 1;
                float top = -INFINITY, sum = 0, *o = out + (row * heads + h) * dim;
                memset(o, 0, sizeof(float) * (size_t)dim);
                for (long j = 0; j < seen; j++) {
                    const float *key = (const float *)k.data + ((b * capacity + j) * kv_heads + head) * dim;
                    float score = 0;
                    for (long d = 0; d < dim; d++) score += query[d] * key[d];
                    p[j] = score * scale;
                    if (p[j] > top) top = p[j];
                }
                for (long j = 0; j < seen; j++) {
                    const float *value = (const float *)v.data + ((b * capacity + j) * kv_heads + head) * dim;
                    float weight = expf(p[j] - top);
                    sum += weight;
                    for (long d = 0; d < dim; d++) o[d] += weight * value[d];
                }
                for (long d = 0; d < dim && seen > 0; d++) o[d] /= sum;
            }
    free(p);
}

static void write_results(const char *path, const char *name, Tensor q, const float *out) {
    long bytes = q.shape[0] * q.shape[1] * q.shape[2] * 4;
    char text[256];
    int length = snprintf(text, sizeof text, "{\"%s.out\":{\"dtype\":\"F32\",\"shape\":[%ld,%ld,%ld],\"data_offsets\":[0,%ld]}}",
                          name, q.shape[0], q.shape[1], q.shape[2], bytes);
    FILE *file = fopen(path, "wb");
    if (!file) die("cannot write", path);
    for (int i = 0; i < 8; i++) fputc((int)((uint64_t)length >> (8 * i) & 255), file);
    fwrite(text, 1, (size_t)length, file);
    fwrite(out, 1, (size_t)bytes, file);
    if (fclose(file)) die("cannot write", path);
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) die("usage", "read_vectors CASE.safetensors [RESULTS.safetensors]");
    load(argv[1]);
    Tensor q = tensor("q", "F32"), k = tensor("k", "F32"), v = tensor("v", "F32");
    Tensor starts = tensor("query_start_loc", "I32"), lens = tensor("seq_lens", "I32");
    Tensor expected = tensor("expected_out", "F64"), bound = tensor("bound_out", "F64");
    long count = q.shape[0] * q.shape[1] * q.shape[2], wrong = 0;
    float *out = malloc(sizeof(float) * (size_t)count);
    attend(q, k, v, starts, lens, strtof(setting("scale"), NULL), out);
    double worst = 0;
    for (long i = 0; i < count; i++) {
        double error = fabs(out[i] - ((const double *)expected.data)[i]), allowed = ((const double *)bound.data)[i];
        if (!(error <= allowed)) wrong++;
        if (allowed > 0 && error / allowed > worst) worst = error / allowed;
    }
    if (argc == 3) write_results(argv[2], setting("name"), q, out);
    printf("%ld of %ld numbers out of bounds, the largest error is %.2f of its bound\n", wrong, count, worst);
    return wrong > 0;
}
