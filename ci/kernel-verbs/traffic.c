// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* Messages of all kinds. */
#include <linux/delay.h>
#include <linux/sizes.h>
#include <rdma/ib_pack.h>

#include "kernel-verbs.h"

static const u32 sizes[] = { 0, 1, 64, 1000, 4096, 65536, 1000000 };

/* End b's memory, for remote access. */
static struct ib_mr *target(struct pair *p, struct buffer **buffer, size_t length)
{
	struct segment segment = { .length = length };
	struct segments *segments = make_segments(&segment, 1);
	struct ib_mr *mr;

	mr = make_mr(p->b.pd, IB_MR_TYPE_MEM_REG, DIV_ROUND_UP(length, PAGE_SIZE) + 1);
	registered(&p->b, mr, segments, ALL_ACCESS);
	*buffer = memory(sizeof(**buffer));
	(*buffer)->data = segments->pages[0];
	(*buffer)->length = length;
	return mr;
}

static void send_recv(enum ib_qp_type type, unsigned int last)
{
	struct pair p = PAIR(.type = type);
	struct buffer *from = make_buffer(SZ_1M), *to = make_buffer(SZ_1M);
	unsigned int i;

	for (i = 0; i < last; i++) {
		struct request *request = make_request(&p.a, IB_WR_SEND);
		struct receive *receive = receive_into(&p.b, to, SZ_1M);

		fill(from->data, sizes[i], i);
		memset(to->data, 0, SZ_1M);
		with_buffer(&p.a, request, from, 0, sizes[i]);
		post(&p.a, request);
		expect_ok(&receive->op, IB_WC_RECV);
		EQ(receive->op.wc.byte_len, sizes[i]);
		EQ(receive->op.wc.wc_flags & (IB_WC_WITH_IMM | IB_WC_WITH_INVALIDATE), 0);
		CHECK(filled(to->data, sizes[i], i));
		CHECK(all_zero(to->data + sizes[i], SZ_1M - sizes[i]));
		expect_ok(&request->op, IB_WC_SEND);
	}
}

TEST(rc_send)
{
	send_recv(IB_QPT_RC, ARRAY_SIZE(sizes));
}

TEST(uc_send)
{
	struct ib_qp_init_attr init = {
		.qp_type = IB_QPT_UC, .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ib_pd *pd = make_pd(0);
	struct ib_qp *qp;

	init.send_cq = make_cq(16, IB_POLL_DIRECT);
	init.recv_cq = init.send_cq;
	qp = ib_create_qp(pd, &init);
	if (IS_ERR(qp))
		skip("the device has no UC queue pairs");
	ib_destroy_qp(qp);
	send_recv(IB_QPT_UC, ARRAY_SIZE(sizes));
}

TEST(rc_send_with_imm)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(64), *to = make_buffer(64);
	struct receive *receive = receive_into(&p.b, to, 64);
	struct request *request = make_request(&p.a, IB_WR_SEND_WITH_IMM);

	fill(from->data, 64, 1);
	with_buffer(&p.a, request, from, 0, 64);
	request->wr.ex.imm_data = cpu_to_be32(0x12345678);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	CHECK(receive->op.wc.wc_flags & IB_WC_WITH_IMM);
	EQ(be32_to_cpu(receive->op.wc.ex.imm_data), 0x12345678);
	CHECK(filled(to->data, 64, 1));
}

/* One message from and to lists with entries of odd lengths. */
TEST(rc_send_lists)
{
	struct pair p = PAIR(.sges = 8);
	struct buffer *from = make_buffer(16384), *to = make_buffer(16384);
	struct receive *receive = make_receive(p.b.recv_cq);
	struct request *request = make_request(&p.a, IB_WR_SEND);
	u32 at, length;

	for (at = 0, length = 1; request->wr.num_sge < 8; at += length, length = length * 3 + 1)
		with_buffer(&p.a, request, from, at, length);
	for (length = 2000; receive->wr.num_sge < 8; length -= 200)
		receive_sge(receive, to->addr + 2048 * receive->wr.num_sge, length, p.b.pd->local_dma_lkey);
	fill(from->data, at, 3);
	post_receive(&p.b, receive);
	post(&p.a, request);
	expect_ok(&receive->op, IB_WC_RECV);
	EQ(receive->op.wc.byte_len, at);
	{
		u8 *all = memory(at);
		u32 done = 0;
		int i;

		for (i = 0, length = 2000; done < at; i++, length -= 200) {
			u32 part = min(length, at - done);

			memcpy(all + done, to->data + 2048 * i, part);
			done += part;
		}
		CHECK(filled(all, at, 3));
	}
}

TEST(rc_write)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(SZ_1M), *to;
	struct ib_mr *mr = target(&p, &to, SZ_1M);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		fill(from->data, sizes[i], i);
		memset(to->data, 0, SZ_1M);
		run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, sizes[i], mr->iova, mr->rkey), IB_WC_SUCCESS);
		CHECK(filled(to->data, sizes[i], i));
		CHECK(all_zero(to->data + sizes[i], SZ_1M - sizes[i]));
	}
}

TEST(rc_write_with_imm)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(4096), *to;
	struct ib_mr *mr = target(&p, &to, 4096);
	struct receive *receive = receive_into(&p.b, NULL, 0);
	struct request *request = make_rdma(&p.a, IB_WR_RDMA_WRITE_WITH_IMM, from, 4096, mr->iova, mr->rkey);

	fill(from->data, 4096, 5);
	request->wr.ex.imm_data = cpu_to_be32(0xabcdef01);
	post(&p.a, request);
	expect_ok(&receive->op, IB_WC_RECV_RDMA_WITH_IMM);
	EQ(receive->op.wc.byte_len, 4096);
	EQ(be32_to_cpu(receive->op.wc.ex.imm_data), 0xabcdef01);
	CHECK(filled(to->data, 4096, 5));
	expect_ok(&request->op, IB_WC_RDMA_WRITE);
}

TEST(rc_read)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(SZ_1M), *from;
	struct ib_mr *mr = target(&p, &from, SZ_1M);
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		struct request *request = make_rdma(&p.a, IB_WR_RDMA_READ, into, sizes[i], mr->iova, mr->rkey);

		fill(from->data, sizes[i], i);
		memset(into->data, 0, SZ_1M);
		post(&p.a, request);
		expect_ok(&request->op, IB_WC_RDMA_READ);
		CHECK(filled(into->data, sizes[i], i));
		CHECK(all_zero(into->data + sizes[i], SZ_1M - sizes[i]));
	}
}

/* More reads at once than the other end answers at a time. */
TEST(rc_many_reads)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(32 * 4096), *from;
	struct ib_mr *mr = target(&p, &from, 32 * 4096);
	struct request *requests[32];
	int i;

	fill(from->data, from->length, 9);
	for (i = 0; i < 32; i++) {
		requests[i] = make_request(&p.a, IB_WR_RDMA_READ);
		with_buffer(&p.a, requests[i], into, i * 4096, 4096);
		to_remote(requests[i], mr->iova + i * 4096, mr->rkey);
		post(&p.a, requests[i]);
	}
	for (i = 0; i < 32; i++)
		expect_ok(&requests[i]->op, IB_WC_RDMA_READ);
	CHECK(filled(into->data, into->length, 9));
}

/* What a read brings, the next work request sends if it says FENCE. */
TEST(rc_fence)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(SZ_256K), *from, *to = make_buffer(SZ_256K);
	struct ib_mr *mr = target(&p, &from, SZ_256K);
	int i;

	for (i = 0; i < 8; i++) {
		struct request *read = make_rdma(&p.a, IB_WR_RDMA_READ, into, SZ_256K, mr->iova, mr->rkey);
		struct request *send = make_request(&p.a, IB_WR_SEND);
		struct receive *receive = receive_into(&p.b, to, SZ_256K);

		fill(from->data, SZ_256K, i);
		with_buffer(&p.a, send, into, 0, SZ_256K);
		send->wr.send_flags |= IB_SEND_FENCE;
		read->wr.next = &send->wr;
		post(&p.a, read);
		expect_ok(&read->op, IB_WC_RDMA_READ);
		expect_ok(&send->op, IB_WC_SEND);
		expect_ok(&receive->op, IB_WC_RECV);
		CHECK(filled(to->data, SZ_256K, i));
	}
}

/* Inline data are taken when they are posted: addresses are the kernel's, and keys do not count. */
TEST(rc_inline)
{
	struct pair p = PAIR(.inline_bytes = 64);
	struct buffer *to = make_buffer(64);
	u8 *from = memory(64);
	u32 length;

	for (length = 0; length <= 64; length += 16) {
		struct receive *receive = receive_into(&p.b, to, 64);
		struct request *request = make_request(&p.a, IB_WR_SEND);

		fill(from, 64, length);
		request->wr.send_flags |= IB_SEND_INLINE;
		if (length)
			with_sge(request, (uintptr_t)from, length, 0);
		post(&p.a, request);
		memset(from, 0, 64);
		expect_ok(&receive->op, IB_WC_RECV);
		EQ(receive->op.wc.byte_len, length);
		CHECK(filled(to->data, length, length));
		expect_ok(&request->op, IB_WC_SEND);
	}
}

TEST(rc_inline_write)
{
	struct pair p = PAIR(.inline_bytes = 32);
	struct buffer *to;
	struct ib_mr *mr = target(&p, &to, 4096);
	struct request *request = make_request(&p.a, IB_WR_RDMA_WRITE);
	u8 *from = memory(64);

	fill(from, 32, 4);
	request->wr.send_flags |= IB_SEND_INLINE;
	with_sge(request, (uintptr_t)from, 20, 0);
	with_sge(request, (uintptr_t)from + 20, 12, 0);
	to_remote(request, mr->iova + 7, mr->rkey);
	run(&p.a, request, IB_WC_SUCCESS);
	CHECK(filled(to->data + 7, 32, 4));
	CHECK(all_zero(to->data + 39, 4096 - 39));
}

TEST(rc_inline_too_long)
{
	struct pair p = PAIR(.inline_bytes = 16);
	struct ib_qp_attr attr = {};
	struct ib_qp_init_attr init = {};
	struct request *request = make_request(&p.a, IB_WR_SEND);
	u8 *from;

	OK(ib_query_qp(p.a.qp, &attr, IB_QP_CAP, &init));
	from = memory(init.cap.max_inline_data + 1);
	request->wr.send_flags |= IB_SEND_INLINE;
	with_sge(request, (uintptr_t)from, init.cap.max_inline_data + 1, 0);
	EQ(try_post(&p.a, request), -EINVAL);
}

TEST(rc_too_many_sges)
{
	struct pair p = PAIR(.sges = 2);
	struct ib_qp_attr attr = {};
	struct ib_qp_init_attr init = {};
	struct request *request = make_request(&p.a, IB_WR_SEND);
	struct buffer *from = make_buffer(64);

	OK(ib_query_qp(p.a.qp, &attr, IB_QP_CAP, &init));
	if (init.cap.max_send_sge >= MAX_SGES)
		skip("the device gives more entries than a test can use");
	while (request->wr.num_sge <= init.cap.max_send_sge)
		with_buffer(&p.a, request, from, 0, 1);
	EQ(try_post(&p.a, request), -EINVAL);
}

/* Nobody receives: it fails when the retries are used up. */
TEST(rc_rnr)
{
	struct pair p = PAIR(.rnr_retry = 1);

	run(&p.a, make_request(&p.a, IB_WR_SEND), IB_WC_RNR_RETRY_EXC_ERR);
	expect_state(&p.a, IB_QPS_ERR);
	EQ(state_of(&p.b), IB_QPS_RTS);
}

/* With retries without limit it waits for the receive. */
TEST(rc_rnr_waits)
{
	struct pair p = PAIR();
	struct request *request = make_request(&p.a, IB_WR_SEND);

	post(&p.a, request);
	CHECK(!completes(&request->op, 100));
	receive_into(&p.b, NULL, 0);
	expect_ok(&request->op, IB_WC_SEND);
}

TEST(rc_receive_too_short)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(128), *to = make_buffer(128);
	struct receive *receive = receive_into(&p.b, to, 64);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	with_buffer(&p.a, request, from, 0, 128);
	run(&p.a, request, IB_WC_REM_INV_REQ_ERR);
	expect(&receive->op, IB_WC_LOC_LEN_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

TEST(rc_bad_lkey)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(64);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	with_sge(request, from->addr, 64, 0x7777abcd);
	run(&p.a, request, IB_WC_LOC_PROT_ERR);
	expect_state(&p.a, IB_QPS_ERR);
}

TEST(rc_bad_receive_lkey)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(64);
	struct receive *receive = make_receive(p.b.recv_cq);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	receive_sge(receive, from->addr, 64, 0x7777abcd);
	post_receive(&p.b, receive);
	with_buffer(&p.a, request, from, 0, 64);
	run(&p.a, request, IB_WC_REM_OP_ERR);
	expect(&receive->op, IB_WC_LOC_PROT_ERR);
}

TEST(rc_bad_rkey)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(64);

	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 64, from->addr, 0x7777abcd), IB_WC_REM_ACCESS_ERR);
	expect_state(&p.a, IB_QPS_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

/* The queue pair has to allow it, too. */
TEST(rc_queue_pair_without_right)
{
	struct pair p = PAIR(.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ);
	struct buffer *from = make_buffer(64), *to;
	struct ib_mr *mr = target(&p, &to, 4096);

	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_READ, from, 64, mr->iova, mr->rkey), IB_WC_SUCCESS);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 64, mr->iova, mr->rkey), IB_WC_REM_INV_REQ_ERR);
}

/* Nobody there: the retries run out. */
TEST(rc_no_peer)
{
	struct pair p = PAIR();

	destroy_qp(&p.b);
	run(&p.a, make_request(&p.a, IB_WR_SEND), IB_WC_RETRY_EXC_ERR);
}

/* Atomic operations. */

static struct request *make_atomic(struct end *end, enum ib_wr_opcode opcode, struct buffer *into, u64 addr, u32 rkey)
{
	struct request *request = make_request(end, opcode);

	with_buffer(end, request, into, 0, 8);
	to_remote(request, addr, rkey);
	return request;
}

TEST(rc_fetch_and_add)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(64), *to;
	struct ib_mr *mr;
	u64 *word;
	int i;

	if (device->attrs.atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no atomic operations");
	mr = target(&p, &to, 4096);
	word = (u64 *)(to->data + 16);
	*word = 1000;
	for (i = 0; i < 8; i++) {
		struct request *request = make_atomic(&p.a, IB_WR_ATOMIC_FETCH_AND_ADD, into, mr->iova + 16, mr->rkey);

		request->atomic.compare_add = 7;
		post(&p.a, request);
		expect_ok(&request->op, IB_WC_FETCH_ADD);
		EQ(*(u64 *)into->data, 1000 + 7 * i);
	}
	EQ(*word, 1056);
}

TEST(rc_compare_and_swap)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(64), *to;
	struct request *request;
	struct ib_mr *mr;
	u64 *word;

	if (device->attrs.atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no atomic operations");
	mr = target(&p, &to, 4096);
	word = (u64 *)to->data;
	*word = 5;
	request = make_atomic(&p.a, IB_WR_ATOMIC_CMP_AND_SWP, into, mr->iova, mr->rkey);
	request->atomic.compare_add = 5;
	request->atomic.swap = 99;
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_COMP_SWAP);
	EQ(*(u64 *)into->data, 5);
	EQ(*word, 99);
	request = make_atomic(&p.a, IB_WR_ATOMIC_CMP_AND_SWP, into, mr->iova, mr->rkey);
	request->atomic.compare_add = 5;
	request->atomic.swap = 100;
	run(&p.a, request, IB_WC_SUCCESS);
	EQ(*(u64 *)into->data, 99);
	EQ(*word, 99);
}

static void need_masked_atomics(void)
{
	if (device->attrs.masked_atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no masked atomic operations");
}

TEST(rc_masked_compare_and_swap)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(64), *to;
	struct request *request;
	struct ib_mr *mr;
	u64 *word;

	need_masked_atomics();
	mr = target(&p, &to, 4096);
	word = (u64 *)to->data;
	*word = 0x1122334455667788;
	request = make_atomic(&p.a, IB_WR_MASKED_ATOMIC_CMP_AND_SWP, into, mr->iova, mr->rkey);
	request->atomic.compare_add = 0xffffffffffff7788;
	request->atomic.compare_add_mask = 0xffff;
	request->atomic.swap = 0xaabbccddeeff0011;
	request->atomic.swap_mask = 0xff000000000000ff;
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_MASKED_COMP_SWAP);
	EQ(*(u64 *)into->data, 0x1122334455667788);
	EQ(*word, 0xaa22334455667711);
	request = make_atomic(&p.a, IB_WR_MASKED_ATOMIC_CMP_AND_SWP, into, mr->iova, mr->rkey);
	request->atomic.compare_add_mask = 0xff;
	request->atomic.swap_mask = ~0ull;
	run(&p.a, request, IB_WC_SUCCESS);
	EQ(*(u64 *)into->data, 0xaa22334455667711);
	EQ(*word, 0xaa22334455667711);
}

TEST(rc_masked_fetch_and_add)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(64), *to;
	struct request *request;
	struct ib_mr *mr;
	u64 *word;

	need_masked_atomics();
	mr = target(&p, &to, 4096);
	word = (u64 *)to->data;
	*word = 0x00000000000000ff;
	request = make_atomic(&p.a, IB_WR_MASKED_ATOMIC_FETCH_AND_ADD, into, mr->iova, mr->rkey);
	request->atomic.compare_add = 0x0000000100000001;
	/* The boundary is the highest bit of a field. */
	request->atomic.compare_add_mask = 0x8000000000000080;
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_MASKED_FETCH_ADD);
	EQ(*(u64 *)into->data, 0xff);
	EQ(*word, 0x0000000100000000);
}

TEST(rc_atomic_misaligned)
{
	struct pair p = PAIR();
	struct buffer *into = make_buffer(64), *to;
	struct ib_mr *mr;

	if (device->attrs.atomic_cap == IB_ATOMIC_NONE)
		skip("the device has no atomic operations");
	mr = target(&p, &to, 4096);
	run(&p.a, make_atomic(&p.a, IB_WR_ATOMIC_FETCH_AND_ADD, into, mr->iova + 4, mr->rkey), IB_WC_REM_INV_REQ_ERR);
}

/* UC, UD. */

TEST(uc_write)
{
	struct pair rc = PAIR(), p;
	struct buffer *from = make_buffer(4096), *to;
	struct options options = { .type = IB_QPT_UC };
	struct receive *receive;
	struct request *request;
	struct ib_mr *mr;

	mr = target(&rc, &to, 4096);
	options.srq_pd = rc.b.pd;
	p = connected(&options);
	fill(from->data, 4096, 2);
	request = make_rdma(&p.a, IB_WR_RDMA_WRITE_WITH_IMM, from, 4096, mr->iova, mr->rkey);
	request->wr.ex.imm_data = cpu_to_be32(11);
	receive = receive_into(&p.b, NULL, 0);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_RDMA_WRITE);
	expect_ok(&receive->op, IB_WC_RECV_RDMA_WITH_IMM);
	CHECK(filled(to->data, 4096, 2));
}

static void datagram(enum ib_wr_opcode opcode)
{
	struct pair p = PAIR(.type = IB_QPT_UD);
	struct buffer *from = make_buffer(1024), *to = make_buffer(2048);
	struct request *request = make_request(&p.a, opcode);
	struct receive *receive = receive_into(&p.b, to, 1024 + 40);

	fill(from->data, 1024, 1);
	with_buffer(&p.a, request, from, 0, 1024);
	request->ud.ah = make_ah(p.a.pd);
	request->ud.remote_qpn = p.b.qp->qp_num;
	request->ud.remote_qkey = 0x11223344;
	if (opcode == IB_WR_SEND_WITH_IMM)
		request->wr.ex.imm_data = cpu_to_be32(0x55aa);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	EQ(receive->op.wc.byte_len, 1024 + sizeof(struct ib_grh));
	EQ(receive->op.wc.src_qp, p.a.qp->qp_num);
	CHECK(receive->op.wc.wc_flags & IB_WC_GRH);
	CHECK(filled(to->data + sizeof(struct ib_grh), 1024, 1));
	if (opcode == IB_WR_SEND_WITH_IMM)
		EQ(be32_to_cpu(receive->op.wc.ex.imm_data), 0x55aa);
}

TEST(ud_send)
{
	datagram(IB_WR_SEND);
}

TEST(ud_send_with_imm)
{
	datagram(IB_WR_SEND_WITH_IMM);
}

TEST(ud_other_qkey)
{
	struct pair p = PAIR(.type = IB_QPT_UD);
	struct buffer *from = make_buffer(64), *to = make_buffer(256);
	struct request *request = make_request(&p.a, IB_WR_SEND);
	struct receive *receive = receive_into(&p.b, to, 256);

	with_buffer(&p.a, request, from, 0, 64);
	request->ud.ah = make_ah(p.a.pd);
	request->ud.remote_qpn = p.b.qp->qp_num;
	request->ud.remote_qkey = 0x11223345;
	run(&p.a, request, IB_WC_SUCCESS);
	CHECK(!completes(&receive->op, 100));
}

/* Both ways at once, in lists, for a while. */
TEST(rc_bidirectional)
{
	struct pair p = PAIR(.polled = true, .context = IB_POLL_SOFTIRQ);
	struct buffer *from = make_buffer(16384), *to = make_buffer(16384);
	int round, i;

	for (round = 0; round < 20; round++) {
		struct request *there[16], *back[16];

		for (i = 0; i < 16; i++) {
			receive_into(&p.a, to, 8192);
			receive_into(&p.b, to, 8192);
			there[i] = make_request(&p.a, IB_WR_SEND);
			back[i] = make_request(&p.b, IB_WR_SEND);
			with_buffer(&p.a, there[i], from, 0, 512 * i);
			with_buffer(&p.b, back[i], from, 0, 512 * i);
			if (i) {
				there[i - 1]->wr.next = &there[i]->wr;
				back[i - 1]->wr.next = &back[i]->wr;
			}
		}
		post(&p.a, there[0]);
		post(&p.b, back[0]);
		for (i = 0; i < 16; i++) {
			expect_ok(&there[i]->op, IB_WC_SEND);
			expect_ok(&back[i]->op, IB_WC_SEND);
		}
	}
}

const struct test traffic_tests[] = {
	ENTRY(rc_send),
	ENTRY(uc_send),
	ENTRY(rc_send_with_imm),
	ENTRY(rc_send_lists),
	ENTRY(rc_write),
	ENTRY(rc_write_with_imm),
	ENTRY(rc_read),
	ENTRY(rc_many_reads),
	ENTRY(rc_fence),
	ENTRY(rc_inline),
	ENTRY(rc_inline_write),
	ENTRY(rc_inline_too_long),
	ENTRY(rc_too_many_sges),
	ENTRY(rc_rnr),
	ENTRY(rc_rnr_waits),
	ENTRY(rc_receive_too_short),
	ENTRY(rc_bad_lkey),
	ENTRY(rc_bad_receive_lkey),
	ENTRY(rc_bad_rkey),
	ENTRY(rc_queue_pair_without_right),
	ENTRY(rc_no_peer),
	ENTRY(rc_fetch_and_add),
	ENTRY(rc_compare_and_swap),
	ENTRY(rc_masked_compare_and_swap),
	ENTRY(rc_masked_fetch_and_add),
	ENTRY(rc_atomic_misaligned),
	ENTRY(uc_write),
	ENTRY(ud_send),
	ENTRY(ud_send_with_imm),
	ENTRY(ud_other_qkey),
	ENTRY(rc_bidirectional),
	{},
};
