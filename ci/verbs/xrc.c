// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* XRC: domains, initiators and targets, targets opened by other processes. */
#include "verbs-test.h"

#include <arpa/inet.h>
#include <fcntl.h>

static struct ibv_xrcd *open_xrcd(int fd, int flags)
{
	struct ibv_xrcd_init_attr attr = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd,
					   .oflags = flags };

	return ibv_open_xrcd(ctx, &attr);
}

static struct ibv_srq *make_srq(struct ibv_pd *pd, struct ibv_xrcd *xrcd, struct ibv_cq *cq, uint32_t limit)
{
	struct ibv_srq_init_attr_ex attr = {
		.attr = { .max_wr = 32, .max_sge = 2, .srq_limit = limit },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = pd,
		.xrcd = xrcd,
		.cq = cq,
	};

	return MAKE(ibv_create_srq_ex(ctx, &attr));
}

static uint32_t number_of(struct ibv_srq *srq)
{
	uint32_t number = 0;

	OK(ibv_get_srq_num(srq, &number));
	CHECK(number != 0);
	return number;
}

static struct ibv_qp *make_target(struct ibv_xrcd *xrcd)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };

	return MAKE(ibv_create_qp_ex(ctx, &attr));
}

static struct ibv_qp *make_initiator(struct ibv_pd *pd, struct ibv_cq *cq, uint64_t ops)
{
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_XRC_SEND,
		.send_cq = cq,
		.cap = { .max_send_wr = 32, .max_send_sge = 2, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | (ops ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
		.pd = pd,
		.send_ops_flags = ops,
	};

	return MAKE(ibv_create_qp_ex(ctx, &attr));
}

/* An initiator and a target, connected, with a shared receive queue each for two receivers. */
struct xrc {
	struct ibv_pd *pd, *srq_pd;
	struct ibv_xrcd *xrcd;
	struct ibv_cq *cq, *srq_cq[2];
	struct ibv_srq *srq[2];
	struct ibv_qp *ini, *tgt;
	struct region from, to;
};

static struct xrc make_xrc(uint64_t ops, const struct conn *how)
{
	struct xrc x;
	struct conn to = how ? *how : conn(0);

	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC))
		skip("the device has no XRC");
	x.pd = MAKE(ibv_alloc_pd(ctx));
	x.srq_pd = MAKE(ibv_alloc_pd(ctx));
	x.xrcd = MAKE(open_xrcd(-1, O_CREAT));
	x.cq = make_cq(64);
	for (int i = 0; i < 2; i++) {
		x.srq_cq[i] = make_cq(64);
		x.srq[i] = make_srq(x.srq_pd, x.xrcd, x.srq_cq[i], 0);
	}
	x.from = region(x.pd, 65536, ALL);
	x.to = region(x.srq_pd, 65536, ALL);
	x.ini = make_initiator(x.pd, x.cq, ops);
	x.tgt = make_target(x.xrcd);
	to.qpn = x.tgt->qp_num;
	connect_qp(x.ini, &to);
	to.qpn = x.ini->qp_num;
	connect_qp(x.tgt, &to);
	return x;
}

static void all_operations(bool ex)
{
	struct xrc x = make_xrc(ex ? IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
					     IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
					     IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
				   : 0, NULL);
	uint32_t numbers[2] = { number_of(x.srq[0]), number_of(x.srq[1]) };
	struct ibv_wc wc;

	CHECK(numbers[0] != numbers[1]);
	fill(x.from.p, 4000, 1);
	for (int i = 0; i < 2; i++)
		for (int j = 0; j < 3; j++)
			OK(post_srq(x.srq[i], 10 * i + j, &x.to, 32768 + 4096 * (3 * i + j), 4096));
	/* To the second first: which queue is taken is the message's choice. */
	POST(x.ini, .opcode = IBV_WR_SEND, .id = 1, .from = &x.from, .length = 4000, .srqn = numbers[1], .ex = ex);
	expect_ok(x.cq, 1, SEND);
	wc = expect_ok(x.srq_cq[1], 10, RECV);
	EQ(wc.byte_len, 4000);
	EQ(wc.qp_num, x.tgt->qp_num);
	CHECK(filled(x.to.p + 32768 + 4096 * 3, 4000, 1));
	POST(x.ini, .opcode = IBV_WR_SEND_WITH_IMM, .id = 2, .from = &x.from, .length = 40, .srqn = numbers[0],
	     .imm = htonl(9), .flags = IBV_SEND_INLINE, .ex = ex);
	expect_ok(x.cq, 2, SEND);
	wc = expect_ok(x.srq_cq[0], 0, RECV);
	EQ(ntohl(wc.imm_data), 9);
	EQ(wc.byte_len, 40);
	CHECK(filled(x.to.p + 32768, 40, 1));
	POST(x.ini, .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &x.from, .length = 4000, .to = &x.to, .srqn = numbers[0],
	     .ex = ex);
	expect_ok(x.cq, 3, RDMA_WRITE);
	CHECK(filled(x.to.p, 4000, 1));
	POST(x.ini, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 4, .from = &x.from, .length = 100, .to = &x.to,
	     .to_offset = 8192, .srqn = numbers[0], .imm = htonl(10), .ex = ex);
	expect_ok(x.cq, 4, RDMA_WRITE);
	wc = expect_ok(x.srq_cq[0], 1, RECV_RDMA_WITH_IMM);
	EQ(ntohl(wc.imm_data), 10);
	CHECK(filled(x.to.p + 8192, 100, 1));
	POST(x.ini, .opcode = IBV_WR_RDMA_READ, .id = 5, .from = &x.from, .offset = 8192, .length = 4000, .to = &x.to,
	     .srqn = numbers[0], .ex = ex);
	expect_ok(x.cq, 5, RDMA_READ);
	CHECK(filled(x.from.p + 8192, 4000, 1));
	uint64_t *word = (uint64_t *)(x.to.p + 16384), *old = (uint64_t *)(x.from.p + 16384);
	*word = 40;
	POST(x.ini, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 6, .from = &x.from, .offset = 16384, .length = 8, .to = &x.to,
	     .to_offset = 16384, .compare_add = 2, .srqn = numbers[1], .ex = ex);
	expect_ok(x.cq, 6, FETCH_ADD);
	EQ(*word, 42);
	EQ(*old, 40);
	POST(x.ini, .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .id = 7, .from = &x.from, .offset = 16384, .length = 8, .to = &x.to,
	     .to_offset = 16384, .compare_add = 42, .swap = 7, .srqn = numbers[1], .ex = ex);
	expect_ok(x.cq, 7, COMP_SWAP);
	EQ(*word, 7);
	EQ(*old, 42);
}

TEST(xrc_all_operations)
{
	all_operations(false);
}

TEST(xrc_all_operations_ex)
{
	all_operations(true);
}

/* A number that is no SRQ's: an invalid request. */
TEST(xrc_unknown_srq)
{
	struct xrc x = make_xrc(0, NULL);

	POST(x.ini, .opcode = IBV_WR_SEND, .id = 1, .from = &x.from, .length = 8, .srqn = 0xabcdef);
	expect_error(x.cq, 1, REM_INV_REQ_ERR);
	wait_state(x.ini, IBV_QPS_ERR);
	wait_state(x.tgt, IBV_QPS_ERR);
	struct ibv_async_event event = wait_event(QP_REQ_ERR);
	CHECK(event.element.qp == x.tgt);
}

/* An SRQ of another domain is not to be reached. */
TEST(xrc_srq_of_other_domain)
{
	struct xrc x = make_xrc(0, NULL);
	struct ibv_xrcd *other = MAKE(open_xrcd(-1, O_CREAT));
	struct ibv_srq *srq = make_srq(x.srq_pd, other, x.srq_cq[0], 0);

	OK(post_srq(srq, 1, &x.to, 0, 64));
	POST(x.ini, .opcode = IBV_WR_SEND, .id = 1, .from = &x.from, .length = 8, .srqn = number_of(srq));
	expect_error(x.cq, 1, REM_INV_REQ_ERR);
	expect_none(x.srq_cq[0]);
}

TEST(xrc_rnr)
{
	struct conn how = conn(0);

	how.rnr_retry = 1;
	how.min_rnr_timer = 10;
	struct xrc x = make_xrc(0, &how);
	POST(x.ini, .opcode = IBV_WR_SEND, .id = 1, .from = &x.from, .length = 8, .srqn = number_of(x.srq[0]));
	expect_error(x.cq, 1, RNR_RETRY_EXC_ERR);
	wait_state(x.ini, IBV_QPS_ERR);
}

TEST(xrc_srq_limit)
{
	struct xrc x = make_xrc(0, NULL);
	struct ibv_srq_attr attr = { .srq_limit = 2 };

	for (int i = 0; i < 4; i++)
		OK(post_srq(x.srq[0], i, &x.to, 64 * i, 64));
	OK(ibv_modify_srq(x.srq[0], &attr, IBV_SRQ_LIMIT));
	for (int i = 0; i < 2; i++) {
		POST(x.ini, .opcode = IBV_WR_SEND, .id = i, .from = &x.from, .length = 8, .srqn = number_of(x.srq[0]));
		expect_ok(x.cq, i, SEND);
	}
	no_event();
	POST(x.ini, .opcode = IBV_WR_SEND, .id = 2, .from = &x.from, .length = 8, .srqn = number_of(x.srq[0]));
	expect_ok(x.cq, 2, SEND);
	CHECK(wait_event(SRQ_LIMIT_REACHED).element.srq == x.srq[0]);
	OK(ibv_query_srq(x.srq[0], &attr));
	EQ(attr.srq_limit, 0);
}

TEST(xrc_bad_parameters)
{
	struct xrc x = make_xrc(0, NULL);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr qp_attr;
	struct ibv_recv_wr *bad, wr = { .wr_id = 1 };

	/* In use. */
	FAILS(EBUSY, ibv_close_xrcd(x.xrcd));
	/* It has no receive queue. */
	FAILS(EINVAL, ibv_post_recv(x.ini, &wr, &bad));
	FAILS(EINVAL, ibv_post_recv(x.tgt, &wr, &bad));
	OK(ibv_query_qp(x.tgt, &qp_attr, IBV_QP_STATE | IBV_QP_DEST_QPN, &init));
	EQ(qp_attr.qp_state, IBV_QPS_RTS);
	EQ(qp_attr.dest_qp_num, x.ini->qp_num);
	EQ(init.qp_type, IBV_QPT_XRC_RECV);
	OK(ibv_destroy_qp(x.tgt));
	FAILS(EBUSY, ibv_close_xrcd(x.xrcd));
	OK(ibv_destroy_srq(x.srq[0]));
	OK(ibv_destroy_srq(x.srq[1]));
	OK(ibv_close_xrcd(x.xrcd));
}

/* Exclusive creation, and a file that stands for the domain. */
TEST(xrc_domain_by_file)
{
	char path[] = "/tmp/xrcd-XXXXXX";
	int fd = mkstemp(path);
	struct ibv_xrcd *one, *two;

	CHECK(fd >= 0);
	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC))
		skip("the device has no XRC");
	/* There is none yet. */
	MAKE_FAILS(EAGAIN, open_xrcd(fd, 0));
	one = MAKE(open_xrcd(fd, O_CREAT | O_EXCL));
	MAKE_FAILS(EINVAL, open_xrcd(fd, O_CREAT | O_EXCL));
	two = MAKE(open_xrcd(fd, O_CREAT));
	OK(ibv_close_xrcd(one));
	/* The second still has it. */
	one = MAKE(open_xrcd(fd, 0));
	OK(ibv_close_xrcd(one));
	OK(ibv_close_xrcd(two));
	MAKE_FAILS(EAGAIN, open_xrcd(fd, 0));
	unlink(path);
}

/*
 * Two processes receive: the first creates the target queue pair, the second shares the domain by
 * its file and opens the target by its number. Then the first goes away, and messages to the
 * second's SRQ still arrive.
 */

struct shared {
	char path[32];
	uint32_t target, srqn;
};

static void opener(struct link *link)
{
	struct shared shared;
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE |
						      IBV_QP_OPEN_ATTR_CONTEXT,
					 .qp_type = IBV_QPT_XRC_RECV, .qp_context = &attr };
	int fd;

	ctx = open_device();
	get(link, &shared, sizeof(shared));
	fd = open(shared.path, O_RDONLY);
	CHECK(fd >= 0);
	struct ibv_xrcd *xrcd = MAKE(open_xrcd(fd, 0));
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(32);
	struct ibv_srq *srq = make_srq(pd, xrcd, cq, 0);
	struct region to = region(pd, 4096, ALL);
	attr.qp_num = shared.target;
	attr.xrcd = xrcd;
	struct ibv_qp *qp = MAKE(ibv_open_qp(ctx, &attr));
	EQ(qp->qp_num, shared.target);
	CHECK(qp->qp_context == &attr);
	struct ibv_qp_attr state;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(qp, &state, IBV_QP_STATE, &init));
	EQ(state.qp_state, IBV_QPS_RTS);
	for (int i = 0; i < 2; i++)
		OK(post_srq(srq, i, &to, 2048 * i, 2048));
	shared.srqn = number_of(srq);
	put(link, &shared, sizeof(shared));
	for (int i = 0; i < 2; i++) {
		struct ibv_wc wc = expect_ok(cq, i, RECV);

		EQ(wc.byte_len, 1000);
		EQ(wc.qp_num, shared.target);
		CHECK(filled(to.p + 2048 * i, 1000, 50 + i));
		meet(link);
	}
	/*
	 * The last message names no SRQ. (Linux tells events of a target to who created it, not to who
	 * opened it.)
	 */
	wait_state(qp, IBV_QPS_ERR);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_srq(srq));
	OK(ibv_close_xrcd(xrcd));
}

static void creator(struct link *link)
{
	struct shared shared;
	uint32_t initiator;

	ctx = open_device();
	get(link, &shared, sizeof(shared));
	get(link, &initiator, sizeof(initiator));
	int fd = open(shared.path, O_RDONLY);
	CHECK(fd >= 0);
	struct ibv_xrcd *xrcd = MAKE(open_xrcd(fd, O_CREAT));
	struct ibv_qp *tgt = make_target(xrcd);
	struct conn to = conn(initiator);
	connect_qp(tgt, &to);
	shared.target = tgt->qp_num;
	put(link, &shared, sizeof(shared));
	meet(link);
	/* Ends with all that it has open; the target lives on as long as another has it open. */
}

TEST(xrc_target_opened_by_other_process)
{
	struct shared shared = { .path = "/tmp/xrcd-XXXXXX" };
	int fd = mkstemp(shared.path);
	pid_t pids[2];
	struct link *links[2] = { child(creator, &pids[0]), NULL };
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(32);
	struct region from = region(pd, 4096, ALL);
	struct ibv_qp *ini;
	struct conn to;

	CHECK(fd >= 0);
	if (!(dev.orig_attr.device_cap_flags & IBV_DEVICE_XRC))
		skip("the device has no XRC");
	ini = make_initiator(pd, cq, 0);
	put(links[0], &shared, sizeof(shared));
	put(links[0], &ini->qp_num, sizeof(ini->qp_num));
	get(links[0], &shared, sizeof(shared));
	to = conn(shared.target);
	connect_qp(ini, &to);
	links[1] = child(opener, &pids[1]);
	put(links[1], &shared, sizeof(shared));
	get(links[1], &shared, sizeof(shared));
	for (int i = 0; i < 2; i++) {
		fill(from.p, 1000, 50 + i);
		POST(ini, .opcode = IBV_WR_SEND, .id = i, .from = &from, .length = 1000, .srqn = shared.srqn);
		expect_ok(cq, i, SEND);
		meet(links[1]);
		if (i == 0) {
			meet(links[0]);
			join(pids[0]);
		}
	}
	POST(ini, .opcode = IBV_WR_SEND, .id = 2, .from = &from, .length = 1000, .srqn = 0xfffffe);
	expect_error(cq, 2, REM_INV_REQ_ERR);
	join(pids[1]);
	unlink(shared.path);
}

/* A number that is no target's cannot be opened. */
TEST(xrc_open_unknown_qp)
{
	struct xrc x = make_xrc(0, NULL);
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
					 .qp_type = IBV_QPT_XRC_RECV, .xrcd = x.xrcd };

	attr.qp_num = 0xfffffe;
	MAKE_FAILS(EINVAL, ibv_open_qp(ctx, &attr));
	attr.qp_num = x.ini->qp_num;
	MAKE_FAILS(EINVAL, ibv_open_qp(ctx, &attr));
	/* Nor one of another domain. */
	attr.xrcd = MAKE(open_xrcd(-1, O_CREAT));
	attr.qp_num = x.tgt->qp_num;
	MAKE_FAILS(EINVAL, ibv_open_qp(ctx, &attr));
	attr.xrcd = x.xrcd;
	struct ibv_qp *again = MAKE(ibv_open_qp(ctx, &attr));
	OK(ibv_destroy_qp(again));
}
