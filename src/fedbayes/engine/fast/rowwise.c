/* Gradient steps on one row each, for many clients: a linear map, or one hidden layer of ReLU, and a squared error.
   One client after another, so that its weights stay in the first cache; hidden weights are held inputs first, so that
   the inner loops run over the hidden units. What it computes is the point client's step; see rowwise.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

static float dot(const float *restrict a, const float *restrict b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static float shortened(float squared_length, float most) {
    float length = sqrtf(squared_length);
    return most > 0 && length > most ? most / length : 1;
}

/* weights: hidden [H][F], its bias [H], out [H], its bias [1]; without hidden units out [F] and its bias [1]. */
void rowwise(float *weights, const float *x, const float *y, const int64_t *rows, const int64_t *lengths,
             const float *rates, const float *most, float sharpness, int falling, int64_t stride, int64_t client0,
             int64_t clients, int64_t inputs, int64_t hidden, float *losses) {
    int F = (int)inputs, H = (int)hidden;
    int64_t P = H ? (int64_t)H * F + 2 * H + 1 : F + 1;
    float *turned = malloc(sizeof(float) * (size_t)(H ? H * F + 3 * H : 1));
    float *before = turned + (int64_t)H * F, *after = before + H, *slope = after + H;
    for (int64_t k = client0; k < client0 + clients; k++) {
        float *w = weights + k * P, *bias = w + (int64_t)H * F, *out = H ? bias + H : w, *last = w + P - 1;
        double loss = 0;
        for (int h = 0; h < H; h++)
            for (int f = 0; f < F; f++) turned[(int64_t)f * H + h] = w[(int64_t)h * F + f];
        for (int64_t s = 0; s < lengths[k]; s++) {
            int64_t row = rows[s * stride + k];
            const float *in = x + row * F;
            float rate = falling ? rates[k] * (1 - (float)s / (float)lengths[k]) : rates[k];
            const float *seen = in;
            int width = F;
            if (H) {
                for (int h = 0; h < H; h++) before[h] = bias[h];
                for (int f = 0; f < F; f++) {
                    float v = in[f];
                    const float *column = turned + (int64_t)f * H;
                    for (int h = 0; h < H; h++) before[h] += v * column[h];
                }
                for (int h = 0; h < H; h++) after[h] = before[h] > 0 ? before[h] : 0;
                seen = after, width = H;
            }
            float error = dot(seen, out, width) + *last - y[row];
            float pull = sharpness * error;
            loss += 0.5 * sharpness * error * error;
            float squares = pull * pull * (dot(seen, seen, width) + 1);
            if (H) {
                for (int h = 0; h < H; h++) slope[h] = before[h] > 0 ? pull * out[h] : 0;
                squares += dot(slope, slope, H) * (dot(in, in, F) + 1);
            }
            float step = rate * shortened(squares, most[k]);
            for (int i = 0; i < width; i++) out[i] -= step * pull * seen[i];
            *last -= step * pull;
            if (H) {
                for (int h = 0; h < H; h++) slope[h] *= step, bias[h] -= slope[h];
                for (int f = 0; f < F; f++) {
                    float v = in[f];
                    float *column = turned + (int64_t)f * H;
                    for (int h = 0; h < H; h++) column[h] -= v * slope[h];
                }
            }
        }
        for (int h = 0; h < H; h++)
            for (int f = 0; f < F; f++) w[(int64_t)h * F + f] = turned[(int64_t)f * H + h];
        losses[k] += (float)loss;
    }
    free(turned);
}
