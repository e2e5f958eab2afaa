//! Norms, rotations, activations.

use super::*;
use crate::mlx::cpu_ops::{Activation, Rotation};
use crate::mlx::fast;

#[test]
fn norms_agree_with_mlx_whatever_the_strides() {
    let kernels = kernels(2);
    let (weight, bias) = (noise(2, &[80]), noise(3, &[80]));
    for shape in [&[80][..], &[2, 3, 80], &[1, 700, 80]] {
        let x = noise(1, shape);
        for x in [x.clone(), strided(&x), turned(&x)] {
            let expected = fast::rms_norm(&x, Some(&weight), 1e-5).unwrap();
            assert_close(&kernels.rms_norm(&x, &weight, 1e-5).unwrap(), &expected, 1e-5);
            for (weight, bias) in [(Some(&weight), Some(&bias)), (None, Some(&bias)), (None, None)] {
                let expected = fast::layer_norm(&x, weight, bias, 1e-5).unwrap();
                assert_close(&kernels.layer_norm(&x, weight, bias, 1e-5).unwrap(), &expected, 1e-5);
            }
        }
    }
}

#[test]
fn a_norm_of_heads_takes_them_where_they_lie() {
    let kernels = kernels(2);
    let (x, weight) = (noise(1, &[2, 5, 3 * 16]), noise(2, &[16]));
    let heads = x.reshape(&[2, 5, 3, 16]).unwrap();
    let expected = fast::rms_norm(&heads, Some(&weight), 1e-6).unwrap().reshape(&[2, 5, 48]).unwrap();
    for x in [x.clone(), strided(&x), turned(&x)] {
        assert_close(&kernels.rms_norm(&x, &weight, 1e-6).unwrap(), &expected, 1e-5);
    }
}

#[test]
fn a_norm_of_a_sum_is_the_two_steps_bit_for_bit() {
    let kernels = kernels(2);
    for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
        let (x, r) = (cast(&noise(1, &[2, 9, 64]), dtype), cast(&noise(2, &[2, 9, 64]), dtype));
        let weight = cast(&noise(3, &[64]), dtype);
        let (sum, normed) = kernels.add_rms_norm(&x, &strided(&r), &weight, 1e-5).unwrap();
        let apart = x.add(&r).unwrap();
        assert_eq!(bits(&sum), bits(&apart));
        assert_eq!(bits(&normed), bits(&kernels.rms_norm(&apart, &weight, 1e-5).unwrap()));
        // Only one of the two is asked for.
        let (_, alone) = kernels.add_rms_norm(&x, &r, &weight, 1e-5).unwrap();
        assert_eq!(bits(&alone), bits(&normed));
    }
}

#[test]
fn rotations_agree_with_mlx_in_every_variant() {
    let kernels = kernels(2);
    let x = noise(1, &[2, 3, 7, 40]);
    let tokens = x.transpose(&[0, 2, 1, 3]).unwrap().reshape(&[2, 7, 120]).unwrap();
    let freqs = Array::from_slice(&(0..16).map(|i| 1.5f32.powi(i)).collect::<Vec<_>>(), &[16]).unwrap();
    for traditional in [false, true] {
        for (offset, scale) in [(0, 1.0), (1000, 0.25)] {
            let base = Rotation::from_base(32, 10_000.0, scale, traditional).unwrap();
            let expected = fast::rope(&x, 32, traditional, Some(10_000.0), scale, offset, None).unwrap();
            for x in [x.clone(), strided(&x), turned(&x)] {
                assert_close(&kernels.rope(&x, &base, offset).unwrap(), &expected, 2e-5);
            }
            for tokens in [tokens.clone(), strided(&tokens), turned(&tokens)] {
                let found = kernels.rope_tokens(&tokens, 3, &base, offset).unwrap();
                assert_close(&found, &expected, 2e-5);
            }
            let own = Rotation::from_freqs(&freqs, 1.5, traditional).unwrap();
            let scaled = x.slice_update(&rows(&x, -1, 0, 32).multiply_scalar(1.5).unwrap(), -1, 0).unwrap();
            let expected = fast::rope(&scaled, 32, traditional, None, 1.0, offset, Some(&freqs)).unwrap();
            assert_close(&kernels.rope(&x, &own, offset).unwrap(), &expected, 2e-4);
        }
    }
}

#[test]
fn activations_agree_with_mlx() {
    let kernels = kernels(2);
    let x = noise(1, &[3, 50]).multiply_scalar(6.0).unwrap();
    let up = noise(2, &[3, 50]);
    let tanh_form = {
        let cube = x.square().unwrap().multiply(&x).unwrap().multiply_scalar(0.044_715).unwrap();
        let inner = x.add(&cube).unwrap().multiply_scalar(0.797_884_6).unwrap().tanh().unwrap();
        x.multiply_scalar(0.5).unwrap().multiply(&inner.add_scalar(1.0).unwrap()).unwrap()
    };
    for (activation, expected) in [
        (Activation::Silu, x.multiply(&x.sigmoid().unwrap()).unwrap()),
        (Activation::GeluQuick, x.multiply(&x.multiply_scalar(1.702).unwrap().sigmoid().unwrap()).unwrap()),
        (Activation::Sigmoid, x.sigmoid().unwrap()),
        (Activation::Identity, x.clone()),
        (Activation::GeluTanh, tanh_form),
    ] {
        for x in [x.clone(), strided(&x), turned(&x)] {
            assert_close(&kernels.activate(activation, &x).unwrap(), &expected, 1e-5);
            let found = kernels.activate_gated(activation, &x, &up).unwrap();
            assert_close(&found, &expected.multiply(&up).unwrap(), 1e-5);
        }
    }
    // Gate and up as halves of one projection.
    let both = noise(3, &[3, 100]);
    let (gate, up) = (rows(&both, 1, 0, 50), rows(&both, 1, 50, 100));
    let expected = gate.multiply(&gate.sigmoid().unwrap()).unwrap().multiply(&up).unwrap();
    assert_close(&kernels.activate_gated(Activation::Silu, &gate, &up).unwrap(), &expected, 1e-5);
}

#[test]
fn rows_are_the_same_alone_and_together_on_any_number_of_threads() {
    let (x, up, weight) = (noise(1, &[1, 300, 96]), noise(2, &[1, 300, 96]), noise(3, &[96]));
    let rotation = Rotation::from_base(32, 10_000.0, 1.0, false).unwrap();
    let results = |kernels: &Kernels, first: i32, last: i32| {
        let (x, up) = (rows(&x, 1, first, last), rows(&up, 1, first, last));
        let turned = kernels.rope_tokens(&x, 3, &rotation, first).unwrap();
        [
            kernels.rms_norm(&x, &weight, 1e-5).unwrap(),
            kernels.add_rms_norm(&x, &up, &weight, 1e-5).unwrap().1,
            kernels.activate_gated(Activation::Silu, &x, &up).unwrap(),
            turned.transpose(&[0, 2, 1, 3]).unwrap().reshape(&[1, last - first, 96]).unwrap(),
        ]
    };
    let whole = results(&kernels(1), 0, 300).map(|x| bits(&x));
    for threads in 1..=8 {
        let kernels = kernels(threads);
        assert_eq!(results(&kernels, 0, 300).map(|x| bits(&x)), whole);
        let parts = [(0, 1), (1, 130), (130, 300)].map(|(a, b)| results(&kernels, a, b).map(|x| bits(&x)));
        for (op, whole) in whole.iter().enumerate() {
            let joined: Vec<u8> = parts.iter().flat_map(|part| part[op].clone()).collect();
            assert_eq!(&joined, whole, "operation {op}, {threads} threads");
        }
    }
}
