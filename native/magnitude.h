/* bl_magnitudes: the largest magnitude in each of many tensors, as bits without their sign.
 *
 * Of floating-point numbers the bits of a larger magnitude are a larger integer, those of infinity
 * are larger than all finite ones, and those of a NaN are larger still.
 */
static uint32_t largest_of_words(const uint32_t *words, int64_t count)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t one = (int32_t)(words[i] & 0x7FFFFFFF);
        largest = one > largest ? one : largest;
    }
    return (uint32_t)largest;
}

static uint32_t largest_of_halves(const uint16_t *halves, int64_t count)
{
    int16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int16_t one = (int16_t)(halves[i] & 0x7FFF);
        largest = one > largest ? one : largest;
    }
    return (uint32_t)largest;
}

static void magnitudes(struct bl_magnitude *tensors, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        struct bl_magnitude *one = &tensors[i];
        one->largest = one->bytes == 4 ? largest_of_words(one->values, one->count)
                                       : largest_of_halves(one->values, one->count);
    }
}
