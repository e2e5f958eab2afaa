//! Attention over caches as they are.

use super::*;
use crate::mlx::cpu_ops::{AttentionArgs, KeysValues, PackedHeads};
use crate::mlx::fast::{self, Mask};
use crate::mlx::{Result, dequantize};

/// What the layers expect: heads side by side.
fn merged(x: &Array) -> Array {
    x.transpose(&[0, 2, 1, 3]).unwrap().reshape(&[x.dim(0), x.dim(2), -1]).unwrap()
}

fn args(mask: &Mask) -> AttentionArgs<'_> {
    AttentionArgs { scale: 0.3, mask, sinks: None }
}

fn stock(q: &Array, k: &Array, v: &Array, mask: &Mask, sinks: Option<&Array>) -> Array {
    merged(&fast::scaled_dot_product_attention(q, k, v, 0.3, mask, sinks).unwrap())
}

/// A slice of a larger buffer, as the growing cache hands out.
fn in_buffer(x: &Array) -> Array {
    let more = Array::full(&[x.dim(0), x.dim(1), 300, x.dim(3)], 1e9, x.dtype()).unwrap();
    let buffer = Array::concatenate([x, &more], 2).unwrap();
    buffer.eval().unwrap();
    rows(&buffer, 2, 0, x.dim(2))
}

fn visible(length: i32, total: i32, window: i32) -> Array {
    crate::cache::causal_mask(length, total - length, Some(window)).unwrap()
}

#[test]
fn attention_agrees_with_mlx_for_every_mask_and_layout() {
    let kernels = kernels(2);
    for (heads, kv_heads, length, total, dim) in
        [(6, 2, 1, 37, 32), (4, 4, 5, 5, 16), (8, 1, 33, 150, 64), (2, 2, 3, 70, 20)]
    {
        let q = noise(1, &[2, heads, length, dim]);
        let (k, v) = (noise(2, &[2, kv_heads, total, dim]), noise(3, &[2, kv_heads, total, dim]));
        let bias = noise(4, &[2, 1, length, total]);
        let low = Array::scalar(f32::NEG_INFINITY, Dtype::Float32).unwrap();
        let hidden = visible(length, total, 9).select(&noise(5, &[length, total]), &low).unwrap();
        let masks = [
            Mask::None,
            Mask::Causal,
            Mask::Array(visible(length, total, 9)),
            Mask::Array(bias),
            Mask::Array(hidden),
        ];
        for mask in &masks {
            let expected = stock(&q, &k, &v, mask, None);
            let layouts = [
                (q.clone(), k.clone(), v.clone()),
                (strided(&q), in_buffer(&k), in_buffer(&v)),
                (turned(&q), turned(&k), strided(&v)),
            ];
            for (q, k, v) in layouts {
                let found = kernels.attention(&q, KeysValues::Dense(&k, &v), &args(mask)).unwrap();
                assert_close(&found, &expected, 2e-5);
            }
        }
    }
}

#[test]
fn sinks_and_values_of_another_width() {
    let kernels = kernels(2);
    let (q, k, v) = (noise(1, &[1, 4, 3, 32]), noise(2, &[1, 2, 20, 32]), noise(3, &[1, 2, 20, 48]));
    let sinks = noise(4, &[4]);
    for mask in [Mask::None, Mask::Causal, Mask::Array(visible(3, 20, 7))] {
        let expected = stock(&q, &k, &v, &mask, Some(&sinks));
        let with_sinks = AttentionArgs { sinks: Some(&sinks), ..args(&mask) };
        let found = kernels.attention(&q, KeysValues::Dense(&k, &v), &with_sinks).unwrap();
        assert_close(&found, &expected, 2e-5);
    }
}

#[test]
fn packed_keys_and_values_are_read_where_they_lie() {
    let kernels = kernels(2);
    let q = noise(1, &[1, 6, 4, 64]);
    let (k, v) = (noise(2, &[1, 2, 50, 64]), noise(3, &[1, 2, 50, 64]));
    for params in [AFFINE4, QuantParams { bits: 8, group_size: 64, mode: QuantMode::Affine }] {
        let (k, v) = (pack(&k, params), pack(&v, params));
        let open = |x: &[Array]| dequantize(&x[0], &x[1], Some(&x[2]), params).unwrap();
        for mask in [Mask::None, Mask::Causal, Mask::Array(visible(4, 50, 9))] {
            let expected = stock(&q, &open(&k), &open(&v), &mask, None);
            let stored: [fn(&Array) -> Array; 3] = [Array::clone, strided, turned];
            for place in stored {
                let (k, v): (Vec<_>, Vec<_>) = (k.iter().map(place).collect(), v.iter().map(place).collect());
                let keys_values = KeysValues::Packed(packed(&k), packed(&v), params);
                let found = kernels.attention(&q, keys_values, &args(&mask)).unwrap();
                assert_close(&found, &expected, 2e-5);
            }
        }
    }
}

fn packed(x: &[Array]) -> PackedHeads<'_> {
    PackedHeads { weight: &x[0], scales: &x[1], biases: &x[2] }
}

/// A prompt's rows are the same in one chunk, in several and alone, on any number of threads.
#[test]
fn attention_does_not_depend_on_chunks_or_threads() {
    let (q, k, v) = (noise(1, &[1, 6, 90, 32]), noise(2, &[1, 2, 90, 32]), noise(3, &[1, 2, 90, 32]));
    let part = |kernels: &Kernels, first: i32, last: i32| -> Result<Vec<u8>> {
        let q = rows(&q, 2, first, last);
        let (k, v) = (in_buffer(&rows(&k, 2, 0, last)), in_buffer(&rows(&v, 2, 0, last)));
        kernels.attention(&q, KeysValues::Dense(&k, &v), &args(&Mask::Causal)).map(|x| bits(&x))
    };
    let whole = part(&kernels(1), 0, 90).unwrap();
    for threads in 1..=8 {
        let kernels = kernels(threads);
        for cuts in [&[0, 90][..], &[0, 1, 90], &[0, 40, 80, 89, 90]] {
            let parts = cuts.windows(2).flat_map(|cut| part(&kernels, cut[0], cut[1]).unwrap());
            assert_eq!(parts.collect::<Vec<u8>>(), whole, "{threads} threads, {cuts:?}");
        }
    }
}

/// Rows of a batch do not see each other.
#[test]
fn a_batch_is_its_members() {
    let kernels = kernels(2);
    let (q, k, v) = (noise(1, &[3, 4, 2, 32]), noise(2, &[3, 2, 19, 32]), noise(3, &[3, 2, 19, 32]));
    let both = bits(&kernels.attention(&q, KeysValues::Dense(&k, &v), &args(&Mask::Causal)).unwrap());
    let alone = (0..3).flat_map(|i| {
        let [q, k, v] = [&q, &k, &v].map(|x| rows(x, 0, i, i + 1));
        bits(&kernels.attention(&q, KeysValues::Dense(&k, &v), &args(&Mask::Causal)).unwrap())
    });
    assert_eq!(alone.collect::<Vec<u8>>(), both);
}
